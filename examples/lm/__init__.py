"""A byte-level language model trained with flashjax: what `examples/train_lm.py` is made of."""

"""The kernels, one folder per architecture, and what they share. Imported as flashjax.kernels."""

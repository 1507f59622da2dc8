"""How tiles and their vectors lie in a warpgroup's registers: as products leave them.

`VECTORS`: those along each axis of a tile.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu

TILE = plgpu.Layout.WGMMA
VECTORS = ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)
SCALAR = plgpu.Layout.WG_SPLAT(())

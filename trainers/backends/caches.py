"""What torch remembers of a process group after its end, and how to make it forget.

DTensor caches by mesh, and keeps the mesh, and so the group with its threads, of whoever filled the cache. Worse:
meshes of equal shape are equal to each other, so tensors of the next group would come out bound to the dead one.
"""

from __future__ import annotations

from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def forget_meshes() -> None:
    """Empties every cache of DTensor's. Call it after a group ended, before the next one forms."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()

from .api import chunk_kda, fused_recurrent_kda
from .reference import kda_reference

__all__ = ["chunk_kda", "fused_recurrent_kda", "kda_reference"]

"""The public function."""

from typing import Any

from torch import nn

from .._checks import type_error, value_error
from ..hooks import hooks_status, internals
from .batch import read_batch
from .compare import Comparer
from .layers import find_layers
from .reason import Setup, refusal, sentence
from .report import REFUSED, LeakReport
from .verdict import APART, judge, judge_masks
from .watch import watching

_OP = "leak_report"


def leak_report(model: nn.Module, batch: Any) -> LeakReport:
    """Compare a packed batch with its samples alone, layer by layer, and say whether, where and why samples mix.

    Works on any causal, classification or encoder model of transformers (or one built alike: layers in a
    ``ModuleList``, hidden states ``[1, T, D]`` in and out), with adapters of PEFT or without, with this package's hooks
    on or off and any ``attn_implementation``. Attention that is handed no mask is also compared with eager attention on
    the samples alone: a mask by which tokens see both ways would be lost there too, packed or not.

    The verdicts need no tolerance where a model repeats itself to the bit: a layer *leaks* if its output for one sample
    changes when the hidden states of other samples are drawn again. Each layer is judged by itself, on hidden states of
    the alone runs, so a leak is not blamed on the layers after it.

    For N samples the model runs N + 4 + 4 log2(N) times (N more where eager attention is compared), without gradients,
    in evaluation mode and without a cache. It is left as it was, also after an error. The hidden states of all layers
    are held several times over.

    Args:
        model: the model, on any device and in any dtype.
        batch: what ``DataCollatorWithFlattening`` returns: ``input_ids`` ``[1, T]`` and ``position_ids`` ``[1, T]``
            (or 3 or 4 such rows), ``cu_seq_lens_q`` int32 ``[N + 1]``, ``seq_idx`` ``[1, T]`` or several of them,
            which must agree; two samples at least. Labels are ignored. Further keywords go to the model as they are;
            for the samples alone, tensors ``[1, T, ...]`` are cut.

    Returns:
        A :class:`LeakReport`. Its verdict is ``refused`` where the model runs the samples alone, but raises ValueError,
        TypeError or NotImplementedError on the pack.

    Raises:
        TypeError: ``model`` is no module, ``batch`` no mapping, or a boundary of the wrong type.
        ValueError: ``input_ids`` missing or not one row, no boundaries or malformed ones, fewer than two samples, a
            tensor that cannot be cut into samples, or a model without recognisable layers.
        RuntimeError: the model calls its layers in another order on another row, so they cannot be compared.
    """
    if not isinstance(model, nn.Module):
        raise type_error(_OP, "model", "be a torch.nn.Module", type(model).__name__)
    # A compiled model runs its layers in one piece; the module inside it computes the same.
    model = getattr(model, "_orig_mod", model)
    pack = read_batch(model, batch)
    layers = find_layers(model)
    setup = Setup.of(model, pack, hooks_status(), batch["input_ids"].device)
    with watching(model, layers, pack.virtual) as watch:
        comparer = Comparer(model, pack, watch)
        alone = comparer.alone()
        if all(call.given is None for call in alone.calls):
            raise value_error(_OP, "model", "have layers in a ModuleList that take hidden states [1, T, D]", setup.name)
        try:
            packed = comparer.packed()
        except (ValueError, TypeError, NotImplementedError) as error:
            return LeakReport(setup.title(), REFUSED, refusal(setup, watch.running, error), (), None)
        comparison = comparer.compare(alone, packed)
        verdicts = judge(pack, packed, comparison)
        if verdicts.first is None and setup.attention and setup.attention not in internals.MASK_ATTENTION:
            with internals.eager_attention(model):
                verdicts = judge_masks(pack, verdicts, comparer.against(alone, comparer.alone()))
    verdict = APART if verdicts.first is None else verdicts.first.row.verdict
    output = None if comparison.output is None else float(comparison.output.total.max())
    said = sentence(setup, verdicts.rows, verdicts.first)
    return LeakReport(setup.title(), verdict, said, tuple(verdicts.rows), output)

"""What each head of transformers reads of its row: known about the inside of transformers like ``internals.py``.

Checked against transformers 5.22.2 by ``tests/hooks/test_hooks_heads.py``, which goes through all of its classes.
"""

from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

from . import internals

# What a head reads of each sample: its last token that is no padding, its first token, the mean over its tokens; or
# the result of a module of FIRST_TOKEN_MODULES.
LAST, FIRST, MEAN, POOLED = "last", "first", "mean", "pooled"


class Pooling(NamedTuple):
    """A head that reads what ``attribute`` of its configuration says; None in ``places``: its parent class does."""

    attribute: str
    places: Dict[str, Optional[str]]


_CLS_OR_MEAN = Pooling("classifier_pooling", {"cls": FIRST, "mean": MEAN})
CHOICES = "the choices of a sample are rows of their own"
_ONE_PLACE = "it reads one place of the row"
_PAIRS = "it compares rows with each other"

# Class that defines a forward -> what it reads. Checked against all classes of transformers by a test.
HEADS: Dict[str, Union[str, Pooling]] = {
    **dict.fromkeys(
        (
            "GenericForSequenceClassification", "BioGptForSequenceClassification", "CTRLForSequenceClassification",
            "FalconForSequenceClassification", "GPT2ForSequenceClassification", "GPTBigCodeForSequenceClassification",
            "GPTJForSequenceClassification", "GPTNeoForSequenceClassification", "GPTNeoXForSequenceClassification",
            "ModernBertDecoderForSequenceClassification", "OPTForSequenceClassification",
            "Zamba2ForSequenceClassification", "ZambaForSequenceClassification",
        ),
        LAST,
    ),
    "DistilBertForSequenceClassification": FIRST,
    "ModernBertForSequenceClassification": _CLS_OR_MEAN,
    "ModernVBertForSequenceClassification": _CLS_OR_MEAN,
    "UltraVBertForSequenceClassification": _CLS_OR_MEAN,
    "UltrabertForSequenceClassification": _CLS_OR_MEAN,
    "EuroBertForSequenceClassification": Pooling("classifier_pooling", {"bos": FIRST, "mean": MEAN}),
    "CohereCompassTextForSequenceClassification": Pooling("pooling", {"bos": FIRST, "eos": None}),
    **dict.fromkeys(
        (
            "BertForNextSentencePrediction", "BertForSequenceClassification", "CamembertForSequenceClassification",
            "Data2VecTextForSequenceClassification", "ElectraForSequenceClassification",
            "ErnieForNextSentencePrediction", "ErnieForSequenceClassification", "EsmForSequenceClassification",
            "EsmcForSequenceClassification", "GteForSequenceClassification",
            "JinaEmbeddingsV3ForSequenceClassification", "MobileBertForNextSentencePrediction",
            "MobileBertForSequenceClassification", "NomicBertForSequenceClassification",
            "RoCBertForSequenceClassification", "RobertaForSequenceClassification",
            "RobertaPreLayerNormForSequenceClassification", "XLMRobertaForSequenceClassification",
            "XLMRobertaXLForSequenceClassification", "XmodForSequenceClassification",
        ),
        POOLED,
    ),
}  # fmt: skip
# Modules that read the first token of the hidden states [B, T, D] and nothing else of them.
FIRST_TOKEN_MODULES = (
    "AltRobertaPooler", "BertPooler", "CamembertClassificationHead", "CamembertPooler", "ChineseCLIPTextPooler",
    "Data2VecTextClassificationHead", "Data2VecTextPooler", "ElectraClassificationHead", "ErniePooler",
    "EsmClassificationHead", "EsmPooler", "EsmcClassificationHead", "GtePooler", "JinaEmbeddingsV3ClassificationHead",
    "JinaEmbeddingsV3Pooler", "MobileBertPooler", "NomicBertPooler", "RoCBertPooler", "RobertaClassificationHead",
    "RobertaPooler", "RobertaPreLayerNormClassificationHead", "RobertaPreLayerNormPooler",
    "XLMRobertaClassificationHead", "XLMRobertaPooler", "XLMRobertaXLClassificationHead", "XLMRobertaXLPooler",
    "XmodClassificationHead", "XmodPooler",
)  # fmt: skip
# Class that defines a forward -> why a pack is refused.
REFUSED_HEADS: Dict[str, str] = {
    **dict.fromkeys(
        (
            "Aimv2TextModel", "AltCLIPTextModel", "CLIPSegTextModel", "CLIPTextModel", "GPT2DoubleHeadsModel",
            "InstructBlipQFormerModel", "InstructBlipVideoQFormerModel", "MetaClip2TextModel", "OwlViTTextTransformer",
            "Owlv2TextTransformer", "PeAudioModel", "PeAudioVideoModel", "PeVideoModel", "Sam3LiteTextTextModel",
            "ShieldGemma2ForImageClassification", "SiglipTextModel", "T5Gemma2ForSequenceClassification",
            "T5GemmaForSequenceClassification", "VideoPrismTextModel", "XCLIPTextModel",
        ),
        _ONE_PLACE,
    ),
    "RoCBertForPreTraining": _PAIRS,
    "Tipsv2TextModel": "it reads the mean over the row",
}  # fmt: skip
# Refused unless built without a pooling layer.
POOLING_IN_ITS_FORWARD = ("AlbertModel",)
# Endings of classes that give one result a row; one that no table knows is refused.
_RESULT_A_ROW = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "DoubleHeadsModel")


def is_of_transformers(cls: type) -> bool:
    return cls.__module__.startswith("transformers.")


def head_reads(cls: type) -> Optional[Union[str, Pooling, Dict[str, str]]]:
    """The entry of the tables above for a class that defines a forward, or None for one that is no head.

    A refused one's is ``{"refused": why}``. Classes from elsewhere are not known.
    """
    name = cls.__name__
    if not is_of_transformers(cls):
        return None
    if name in HEADS:
        return HEADS[name]
    if name in REFUSED_HEADS:
        return {"refused": REFUSED_HEADS[name]}
    if name in POOLING_IN_ITS_FORWARD:
        return {"refused": f"{_ONE_PLACE} (it would not if built with add_pooling_layer=False)"}
    if name.endswith("ForMultipleChoice"):
        return {"refused": CHOICES}
    return {"refused": "it is not known which place of the row it reads"} if name.endswith(_RESULT_A_ROW) else None


def place_of(model: Any, reads: Union[str, Pooling, Dict[str, str]]) -> Tuple[Optional[str], str]:
    """What ``model`` reads, None where that is left to another forward; and why a pack is refused, or ""."""
    if isinstance(reads, str):
        return reads, ""
    if isinstance(reads, Pooling):
        chosen = getattr(model.config, reads.attribute, None)
        if chosen in reads.places:
            return reads.places[chosen], ""
        served = " or ".join(map(repr, reads.places))
        return None, f"{reads.attribute} is {chosen!r} in its configuration, and only {served} can be kept apart"
    without = type(model).__name__ in POOLING_IN_ITS_FORWARD and getattr(model, "pooler", None) is None
    return None, "" if without else reads["refused"]


def padding_token(model: Any) -> Optional[int]:
    return getattr(internals.text_config(model), "pad_token_id", None)

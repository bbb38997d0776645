"""A workload of texts: a transformer, how texts are put to it, and which of its weights are tuned."""

from __future__ import annotations

from dataclasses import dataclass

from forwardtune.errors import ExperimentError
from forwardtune.tasks.workload import Workload
from forwardtune.toml_tables import at_least, one_of

GLUE = ("sst2", "mrpc", "qnli", "rte", "stsb")
FILES, PLAIN = "files", "texts"
TEXTS = (*GLUE, FILES, PLAIN)
TRANSFORMER = "transformer"
LM = "lm"
SETUPS = ("prompt", "similarity", "head", LM)
ADAPTERS = ("none", "lora", "prefix", "prompt", "ia3")
PACKED = ("int8", "nf4")
DTYPES = ("float32", "bfloat16", "float16", "float64", *PACKED)


@dataclass(frozen=True, kw_only=True)
class TextWorkload(Workload):
    """A transformer tuned to labelled texts or, as a language model, to the texts themselves.

    weights: the model's folder or GGUF file in the spec's folder or the data folder, ``"package:NAME/FOLDER"`` for one
        inside an installed package or, if downloads are allowed, a name on the Hub.
    setup: how texts are put to the model, ``"prompt"``, ``"similarity"`` or ``"head"``, inferred from the model by
        default; ``"lm"`` asks nothing: a causal model learns to continue the texts, without their labels.
    adapter: ``"lora"``, ``"prefix"``, ``"prompt"`` or ``"ia3"``, tuned instead of the model's own weights.
    template, words: the question and its answers, if not the task's own.
    max_length: the maximum number of tokens in an example.
    pad_token: for a head on a model whose tokenizer has none.
    dtype: of the weights; with ``"int8"`` and ``"nf4"`` they are quantized on load, and frozen but for norms
        and biases.
    train, test, text, label: for ``data = "files"``: tables (.csv, .tsv, .jsonl), and the names of their columns; for
        ``data = "texts"``, which have no labels, tables or files with a text in every line (.txt).
    """

    setup: str = ""
    adapter: str = "none"
    template: str = ""
    words: tuple[str, ...] = ()
    max_length: int = 128
    pad_token: str = ""
    dtype: str = "float32"
    train: str = ""
    test: str = ""
    text: tuple[str, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("data", self.data, TEXTS)
        one_of("network", self.network, (TRANSFORMER,))
        self._check_files()
        if self.setup:
            one_of("setup", self.setup, SETUPS)
        if self.setup == "head" and self.words:
            raise ExperimentError("a head uses no words; leave them out, or choose another setup")
        if self.setup == LM and (self.template or self.words):
            raise ExperimentError("a language model on plain texts uses no template and no words; leave them out")
        if self.fit and self.setup == LM and (self.adapter != "none" or self.dtype in PACKED):
            raise ExperimentError(
                "the last norm of a model with an adapter or packed weights stays as it is; leave fit out"
            )
        self._check_language()
        one_of("adapter", self.adapter, ADAPTERS)
        one_of("dtype", self.dtype, DTYPES)
        if self.objective != "loss" and self.data == "stsb":
            raise ExperimentError(f'stsb asks for scores, which have no {self.objective}; choose the objective "loss"')
        at_least(8, max_length=self.max_length)

    def _check_files(self) -> None:
        """Files are named for texts from files, and for nothing else; plain texts have no labels."""
        applies = {FILES: ("train", "test", "text", "label"), PLAIN: ("train", "test", "text")}.get(self.data, ())
        needed = {FILES: ("train", "text", "label"), PLAIN: ("train",)}.get(self.data, ())
        for name in ("train", "text", "label", "test"):
            given = getattr(self, name)
            if given and name not in applies:
                raise ExperimentError(f"{name} does not apply to {self.data}; leave it out")
            if name in needed and not given:
                raise ExperimentError(f"texts from files need {name!r}; give it")
        if len(self.text) > 2:
            raise ExperimentError(f"an example has one text or two, not {len(self.text)}")

    def _check_language(self) -> None:
        if self.data == PLAIN and self.setup != LM:
            raise ExperimentError('plain texts have no labels: they go with setup = "lm"')
        if self.setup == LM and self.data == FILES:
            raise ExperimentError('a language model needs no labels; name its texts with data = "texts"')
        if self.setup == LM and self.objective != "loss":
            raise ExperimentError(f'texts without labels have no {self.objective}; choose the objective "loss"')

    @property
    def subject(self) -> str:
        return self.name

"""Transformers from a folder or the Hub, whole or with one of peft's adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from forwardtune._compat.transformers import transformers
from forwardtune.errors import ExperimentError, InvalidArgumentError
from forwardtune.integrations.huggingface.footprint import check_fits
from forwardtune.packed import keep_as_packed
from forwardtune.tasks.texts.quantized import bytes_needed, check_rows, dtype_of, freeze_packed, loading, location
from forwardtune.tasks.texts.setups import Head, Language, Prompt, Setup, Similarity

VIRTUAL_TOKENS = 8
"""How many tokens prompt and prefix tuning put in front of a text."""


class PretrainedModel:
    """A pretrained model in a folder or on the Hub: its kind, its tokenizer, and how it is built for a task."""

    def __init__(
        self, path: Path | str, setup: str, adapter: str = "none", dtype: str = "float32", pad_token: str = ""
    ) -> None:
        self.path, self.adapter, self.dtype = str(path), adapter, dtype
        self._place, self._file = location(self.path)
        if (Path(self._place) / "adapter_config.json").exists():  # which transformers would load along
            raise ExperimentError(
                f"{self.path} holds an adapter beside a model; merge them, or move adapter_config.json away"
            )
        with self._errors("config"), quiet():
            self.config = transformers.AutoConfig.from_pretrained(self._place, trust_remote_code=False, **self._file)
        self.kind = self._kind()
        self.setup_name = setup or ("similarity" if self.kind == "encoder" else "prompt")
        self._check_setup()
        with self._errors("tokenizer"), quiet():
            self.tokenizer = self._tokenizer()
        if pad_token:
            if pad_token not in self.tokenizer.get_vocab():
                raise ExperimentError(
                    f"the tokenizer of {self.path} has no token {pad_token!r} to pad with; name one that it has"
                )
            self.tokenizer.pad_token = pad_token
        if self.setup_name == "head" and self.kind == "causal" and self.tokenizer.pad_token_id is None:
            raise ExperimentError(
                f"the tokenizer of {self.path} has no pad token, by which a head finds the end of a text; name one "
                f'(as pad token, "{self.tokenizer.eos_token}"), or use the setup "prompt"'
            )

    def _check_setup(self) -> None:
        if self.setup_name == "prompt" and self.kind == "encoder":
            raise ExperimentError(
                f"{self.path} ({self._architecture}) cannot continue a text: it has no language modeling head; use "
                'the setup "similarity" or "head"'
            )
        if self.setup_name == "lm" and self.kind != "causal":
            raise ExperimentError(
                f'{self.path} ({self._architecture}) does not continue texts word by word; the setup "lm" needs a '
                "causal language model"
            )
        if self.setup_name == "similarity" and self.kind == "causal":
            raise ExperimentError(f'{self.path} continues texts and does not embed them; use the setup "prompt"')
        if self.setup_name == "head" and self.kind == "causal" and self.adapter == "prompt":
            raise ExperimentError(
                "with prompt tuning the head of a causal model cannot find the end of a text; use another adapter, or "
                'the setup "prompt"'
            )

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            lines = (str(error).strip() or type(error).__name__).splitlines()
            first = " ".join(lines[:3]) if lines[0].rstrip().endswith(":") else lines[0]
            raise ExperimentError(f"the {what} of the model {self.path} cannot be loaded: {first}") from None

    @property
    def _architecture(self) -> str:
        return str((self.config.architectures or [type(self.config).__name__])[0])

    def _tokenizer(self) -> Any:
        """AutoTokenizer, given SentencePiece's file alone, drops the space that Llama's texts begin with."""
        ready = any((Path(self.path) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
        if self.config.model_type == "llama" and (Path(self.path) / "tokenizer.model").exists() and not ready:
            return transformers.LlamaTokenizer.from_pretrained(self.path, trust_remote_code=False)
        return transformers.AutoTokenizer.from_pretrained(self._place, trust_remote_code=False, **self._file)

    def _kind(self) -> str:
        if getattr(self.config, "is_encoder_decoder", False):
            raise ExperimentError(f"{self.path} is an encoder-decoder; choose a causal model or an encoder instead")
        if self._file and type(self.config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            return "causal"  # a GGUF file does not name its architecture
        for end in ("ForCausalLM", "LMHeadModel"):
            if self._architecture.endswith(end):
                return "causal"
        return "masked" if self._architecture.endswith(("ForMaskedLM", "ForPreTraining")) else "encoder"

    def setup(self, columns: Sequence[str], template: str, words: Sequence[str], max_length: int) -> Setup:
        """`words` are the answers; a head has one logit per word, or a single one, the score, without words."""
        setup = self._setup(columns, template, words, max_length)
        setup.depth, setup.hidden = (getattr(self.config, name, 0) for name in ("num_hidden_layers", "hidden_size"))
        setup.front = VIRTUAL_TOKENS if self.adapter == "prompt" else 0
        return setup

    def _setup(self, columns: Sequence[str], template: str, words: Sequence[str], max_length: int) -> Setup:
        limit = getattr(self.config, "max_position_embeddings", None) or max_length
        if "roberta" in self.config.model_type:  # its positions begin after that of the pad token
            limit -= self.config.pad_token_id + 1
        room = VIRTUAL_TOKENS if self.adapter in ("prompt", "prefix") else 0
        max_length = min(max_length, limit - room, self.tokenizer.model_max_length)
        if self.setup_name == "lm":
            return Language(self.tokenizer, max_length)
        if self.setup_name == "head":
            return Head(self.tokenizer, max_length, max(1, len(words)), columns, template)
        if self.setup_name == "similarity":
            return Similarity(self.tokenizer, max_length, columns, template, words)
        return Prompt(self.tokenizer, max_length, columns, template, words, masked=self.kind == "masked")

    def check_size(self, device: torch.device) -> None:
        """Refuses a model whose weights do not fit into free memory."""
        if Path(self.path).is_dir():
            with self._errors("size"):
                elements = _elements(Path(self.path), self.config)
                needed = bytes_needed(Path(self.path), elements, self.config, self.dtype)
            try:
                check_fits(needed, self.path, device)
            except InvalidArgumentError as error:
                raise ExperimentError(str(error)) from None

    def build(self, answers: int) -> tuple[nn.Module, list[str]]:
        """The model, and the names of the weights that its files lack, which are drawn from torch's generator."""
        kinds = {"causal": transformers.AutoModelForCausalLM, "masked": transformers.AutoModelForMaskedLM}
        kind: Any = kinds.get(self.kind, transformers.AutoModel)
        more: dict[str, Any] = {**self._file, **loading(self.path, self.config, self.dtype)}
        if self.setup_name == "similarity":
            kind = transformers.AutoModel
        if self.setup_name == "head":
            kind, more = transformers.AutoModelForSequenceClassification, {**more, "num_labels": answers}
        with self._errors("weights"), quiet():
            model, info = kind.from_pretrained(
                self._place, dtype=dtype_of(self.dtype), output_loading_info=True, trust_remote_code=False, **more
            )
        if self.setup_name == "head" and self.tokenizer.pad_token_id is not None:
            model.config.pad_token_id = self.tokenizer.pad_token_id
        if self.setup_name in ("prompt", "lm") and info["missing_keys"]:
            raise ExperimentError(
                f"the files of {self.path} lack {min(info['missing_keys'])!r}, without which it cannot continue a "
                'text; use files that have it, or the setup "similarity" or "head"'
            )
        model.eval()
        keep_as_packed(model)
        check_rows(model)
        new = sorted(info["missing_keys"])
        freeze_packed(model, new)
        if self._file:
            model.name_or_path = ""  # peft would look for a config.json there
        if self.adapter != "none":
            tasks = {"prompt": "CAUSAL_LM", "lm": "CAUSAL_LM", "head": "SEQ_CLS"}
            model = adapt(model, self.adapter, tasks.get(self.setup_name))
            new = [name for name, p in model.named_parameters() if p.requires_grad]
        return model, new


def adapt(model: nn.Module, adapter: str, task: str | None) -> nn.Module:
    """The model with its own weights frozen, and an adapter that is tuned instead."""
    try:
        import peft
    except ImportError:
        raise ExperimentError(f"{adapter} needs peft; install it: pip install peft") from None
    if task == "CAUSAL_LM" and "ForMaskedLM" in type(model).__name__:
        task = "FEATURE_EXTRACTION"
    tokens: dict[str, Any] = {"num_virtual_tokens": VIRTUAL_TOKENS, "task_type": task or "FEATURE_EXTRACTION"}
    configs: dict[str, Any] = {
        "lora": lambda: peft.LoraConfig(r=8, lora_alpha=16, task_type=task),
        "ia3": lambda: peft.IA3Config(task_type=task),
        "prefix": lambda: peft.PrefixTuningConfig(**tokens),
        "prompt": lambda: peft.PromptTuningConfig(**tokens),
    }
    try:
        adapted: Any = peft.get_peft_model(model, configs[adapter]())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExperimentError(
            f"peft cannot add {adapter} to {type(model).__name__} ({error}); choose another adapter"
        ) from None
    adapted.eval()
    return adapted  # type: ignore[no-any-return]


def load_adapter(model: nn.Module, file: Path) -> None:
    """Gives an adapter the weights in a file; of the files beside it, which may name models and code, none is read."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ExperimentError(f"the adapter {file} cannot be read ({error}); tune the model again") from None
    own = get_peft_model_state_dict(model, save_embedding_layers=False)  # "auto" may ask the Hub
    if {name: tensor.shape for name, tensor in weights.items()} != {name: own[name].shape for name in own}:
        raise ExperimentError(f"{file} does not hold the weights that this adapter has on this base; name its own base")
    set_peft_model_state_dict(model, weights)


def _elements(folder: Path, config: Any) -> int:
    """The number of weights in the files of a model."""
    total = 0
    for file in folder.glob("*.safetensors"):
        if file.name.startswith("consolidated"):  # a copy of the others, in another layout
            continue
        with safe_open(file, "pt") as content:
            total += sum(math.prod(content.get_slice(name).get_shape()) for name in content.keys())  # noqa: SIM118
    size = (getattr(config, "dtype", None) or torch.float32).itemsize
    return total or sum(file.stat().st_size for file in folder.glob("*.bin")) // size


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars and advice."""
    from transformers.utils import logging as module

    logging: Any = module
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

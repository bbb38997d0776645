"""Models whose weights are packed, by bitsandbytes on load or in their own files; GGUF files are unpacked on load.

What is packed is frozen: an adapter is tuned or, without one, norms, biases and new heads.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forwardtune._compat.transformers import transformers
from forwardtune.errors import ExperimentError
from forwardtune.packed import is_packed

QUANTIZED: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
"""What bitsandbytes is asked for by the name of a dtype; weights that it does not pack are float32."""
BITS = {"int8": 8, "nf4": 4}


def dtype_of(name: str) -> torch.dtype:
    """Of the weights that are not packed."""
    dtype: torch.dtype = torch.float32 if name in QUANTIZED else getattr(torch, name)
    return dtype


def location(path: str) -> tuple[str, dict[str, str]]:
    """Where transformers finds a model: a folder or a name, with a file in it if it is a GGUF file."""
    return (str(Path(path).parent), {"gguf_file": Path(path).name}) if path.endswith(".gguf") else (path, {})


def loading(path: str, config: Any, dtype: str) -> dict[str, Any]:
    """What transformers is told about packing."""
    packing, theirs = QUANTIZED.get(dtype), getattr(config, "quantization_config", None)
    if path.endswith(".gguf"):
        if packing:
            raise ExperimentError(f"the weights of {path} are unpacked on load, not packed as {dtype}; choose bfloat16")
        return {"quantization_config": transformers.GgufConfig(dequantize=True)}
    if packing is None:
        return {}
    if theirs:
        given = theirs if isinstance(theirs, dict) else theirs.to_dict()
        if any(given.get(name) != value for name, value in packing.items()):
            raise ExperimentError(f"the weights of {path} are already quantized, not as {dtype}; leave the dtype out")
        return {}
    if find_spec("bitsandbytes") is None:
        raise ExperimentError(f"{dtype} needs bitsandbytes; install it: pip install bitsandbytes")
    return {"quantization_config": transformers.BitsAndBytesConfig(**packing)}  # type: ignore[no-untyped-call]


def is_quantized(config: Any, dtype: str) -> bool:
    """Whether a model of this configuration, loaded as a dtype, has packed weights."""
    return dtype in QUANTIZED or getattr(config, "quantization_config", None) is not None


def bytes_needed(folder: Path, elements: int, config: Any, dtype: str) -> int:
    """By the weights of a model in a folder, at least."""
    if getattr(config, "quantization_config", None):
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return elements * BITS[dtype] // 8 if dtype in BITS else elements * dtype_of(dtype).itemsize


def freeze_packed(model: nn.Module, new: list[str]) -> None:
    """Of a quantized model, leaves norms, biases and what is new to be tuned; of another, all."""
    if getattr(model, "hf_quantizer", None):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_packed(parameter) and (parameter.ndim == 1 or name in new))


def check_rows(model: nn.Module) -> None:
    """Refuses 4-bit weights that bitsandbytes 0.50 unpacks wrongly: on a CPU, rows that end within a block."""
    for name, parameter in model.named_parameters():
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None and parameter.device.type == "cpu" and state.shape[-1] % state.blocksize:
            raise ExperimentError(
                f"on a CPU bitsandbytes unpacks 4-bit weights wrongly unless their rows are multiples of "
                f"{state.blocksize}, and those of {name} have {state.shape[-1]}; choose int8"
            )


def check_saved(model: nn.Module) -> None:
    """Refuses a model that could not be saved after its run."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer and not quantizer.is_serializable():
        raise ExperimentError(
            f"transformers cannot save models quantized by {quantizer.quantization_config.quant_method.value}; tune an "
            "adapter, which is saved by itself (--adapter lora)"
        )

"""LoRA adapters: small trainable matrices beside weights that stay as they were loaded.

Source: Hu et al. 2021 (arXiv 2106.09685), as implemented by peft. Dropout is off: sampler and learner would disagree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from agent_r1.devices.sharing import gathered, is_sharded, parts, whole
from agent_r1.files import load_pretrained, model_hash
from agent_r1.learn.model import load_policy
from agent_r1.params import Params
from agent_r1.params.places import adapter_in
from agent_r1.params.stages import LoraParams
from agent_r1.pretrained import adaptable, compute_dtype, default_device

ADAPTER = "default"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BENEATH = "beneath"  # key of `Stored.beneath` in the file of the weights
REMEDY = "bring the policy back (`dvc checkout --force`, a backup), or train it again"

Shapes = Mapping[str, tuple[str, list[int]]]  # peft's name of a tensor -> its type and shape

logger = logging.getLogger(__name__)


class AdapterConfig(BaseModel):
    """The file that configures adapters for peft and vLLM. Further options, which both would obey, are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    r: Annotated[int, Field(ge=1)]
    lora_alpha: Annotated[int, Field(ge=1)]
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)]
    lora_dropout: Annotated[float, Field(ge=0.0, le=0.0)] = 0.0

    @classmethod
    def of(cls, params: LoraParams) -> Self:
        all_layers = params.targets == ["all-linear"]
        return cls(
            r=params.rank, lora_alpha=params.alpha, target_modules="all-linear" if all_layers else params.targets
        )

    @property
    def params(self) -> LoraParams:
        targets = ["all-linear"] if isinstance(self.target_modules, str) else self.target_modules
        return LoraParams(rank=self.r, alpha=self.lora_alpha, targets=targets)


class Stored(NamedTuple):
    """Adapters in the folder of a policy."""

    params: LoraParams
    beneath: str  # `model_hash` of the model that they were trained beside; "" of an older version of the project
    shapes: Shapes


def attach(model: nn.Module, params: LoraParams, *, seed: int) -> None:
    """Freezes a model and adds float32 adapters, which change nothing yet. A ValueError refuses targets of no layer.

    Experts, which are stacked in one tensor, and their router get none.
    """
    from peft import LoraConfig, inject_adapter_in_model  # slow imports, needed by adapters alone

    config = LoraConfig(**AdapterConfig.of(params).model_dump())
    config.target_modules = adaptable(model, config.target_modules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, ADAPTER)
        except ValueError as error:
            raise ValueError(f"model.lora.targets {params.targets} does not fit the model: {error}") from error
    if config.target_parameters:
        raise ValueError(f"model.lora.targets {params.targets} names experts, which take no adapters; leave them out")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Numbers of weights. Tied ones count once."""

    policy: int  # without adapters
    backbone: int  # without the output layer; the critic's
    adapters: int  # of one backbone


def count_parameters(config: PretrainedConfig, adapter: LoraParams | None) -> Parameters:
    """Counts the weights of a model on the meta device, which holds none. Those of a shape are counted once."""
    shape: Any = config.get_text_config()  # mypy takes its class for unhashable
    return _counted(shape.__class__, shape.to_json_string(), adapter and adapter.model_dump_json())


@lru_cache
def _counted(kind: type[PretrainedConfig], shape: str, adapter: str | None) -> Parameters:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind.from_dict(json.loads(shape)), trust_remote_code=False)
        policy = sum(weight.numel() for weight in model.parameters())
        backbone = sum(weight.numel() for weight in model.base_model.parameters())
        if adapter:
            attach(model, LoraParams.model_validate_json(adapter), seed=0)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return Parameters(policy=policy, backbone=backbone, adapters=trained if adapter else 0)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights of an equivalent model without adapters, rounded to their own type.

    Merged weights are on the CPU: a GPU may have no room for them. The model's own weights stay as they are, because
    adding an update and subtracting it again would change their last bits.
    """
    weights = model.state_dict().items()
    state = {name.replace(".base_layer.", "."): weight for name, weight in weights if ".lora_" not in name}
    for name, layer in _adapted(model).items():
        weight = state[f"{name}.weight"]
        update = whole(layer.get_delta_weight(ADAPTER).detach())
        state[f"{name}.weight"] = (whole(weight).float().to(update.device) + update).to("cpu", weight.dtype)
    return state


@contextmanager
def detached(model: nn.Module) -> Iterator[None]:
    """Disables the adapters of a model for a while, so that it is the model that was loaded."""
    layers = _adapted(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights that train, by name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_merged(model: PreTrainedModel, folder: Path, *, writes: bool = True, halved: bool = False) -> None:
    """Writes a Hugging Face folder with merged adapters, its matrices in bfloat16 if `halved`.

    Only the rank that `writes` does; others contribute shards.
    """
    state = merged_state(model) if _adapted(model) else None
    if is_sharded(model) or halved:  # then transformers does not see which weights are tied
        weights = (state or model.state_dict()).items()
        untied = {name: weight for name, weight in weights if name not in model.all_tied_weights_keys}
        state = gathered(untied, keep=writes, halved=_matrices(untied, model) if halved else ())
    if writes:
        model.save_pretrained(folder, state_dict=state)


def _matrices(state: Mapping[str, Tensor], model: PreTrainedModel) -> set[str]:
    """The names of the weights that samplers in bfloat16 round. Vectors are small, and some stay in float32 there."""
    float32_modules = model._keep_in_fp32_modules_strict or ()
    matrices = {name for name, weight in state.items() if weight.dim() > 1 and weight.is_floating_point()}
    return {name for name in matrices if not any(module in name for module in float32_modules)}


def save_adapter(
    model: nn.Module, params: LoraParams, folder: Path, base_model_hash: str, *, writes: bool = True
) -> None:
    """Writes a model's adapters into the folder of its policy, in the format of peft and vLLM.

    `base_model_hash` is of the model that they were attached to; `writes` is as for `save_merged`.
    """
    adapter_folder = adapter_in(folder)
    trained = gathered(trained_state(model), keep=writes)
    if not writes:
        return
    adapter_folder.mkdir(parents=True)
    (adapter_folder / CONFIG).write_text(AdapterConfig.of(params).model_dump_json(indent=2) + "\n")
    weights = {_peft_name(name): weight.contiguous() for name, weight in trained.items()}
    save_file(weights, adapter_folder / WEIGHTS, metadata={BENEATH: base_model_hash})


def load_adapter(model: nn.Module, params: LoraParams, folder: Path, base_model_hash: str) -> None:
    """Loads adapters of the same shape from the folder of a policy. A ValueError refuses others, or none."""
    stored = read_stored(folder)
    if stored is None:
        raise ValueError(f"{folder} holds no adapters, and model.lora.rank is {params.rank}; set it back to 0")
    if stored.params != params:
        raise ValueError(f"{folder} holds adapters of {stored.params}, and model.lora is {params}; set it back")
    _require_fit(stored, folder, _shapes_of(model), base_model_hash)
    weights = load_file(adapter_in(folder) / WEIGHTS)
    trained = {name: weights[_peft_name(name)] for name in trained_state(model)}
    model.load_state_dict(parts(trained, model), strict=False)


def read_stored(folder: Path) -> Stored | None:
    """The adapters in the folder of a policy; None where there are none. A ValueError refuses damaged ones."""
    adapter_folder = adapter_in(folder)
    if not adapter_folder.is_dir():
        return None
    try:
        config = AdapterConfig.model_validate_json((adapter_folder / CONFIG).read_bytes())
        with safe_open(adapter_folder / WEIGHTS, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            shapes = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in slices.items()}
            base_model_hash = (file.metadata() or {}).get(BENEATH, "")
        return Stored(config.params, base_model_hash, shapes)
    except ValidationError as fault:
        [first, *_] = fault.errors()
        reason = f"{CONFIG}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, SafetensorError) as fault:
        reason = str(fault).splitlines()[0]
    raise ValueError(f"{adapter_folder} holds no adapters that were written here: {reason}; {REMEDY}")


def require_fit(stored: Stored, folder: Path, model: str | Path) -> None:
    """Checks the adapters in a policy's folder against the model that they shall run beside.

    Raises ValueError if they were trained beside another model, or if a tensor does not fit the model's layers.
    """
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(load_pretrained(AutoConfig, model), trust_remote_code=False)
        attach(empty, stored.params, seed=0)
    _require_fit(stored, folder, _shapes_of(empty), model_hash(str(model)))


def _require_fit(stored: Stored, folder: Path, expected: Shapes, base_model_hash: str) -> None:
    if stored.beneath not in ("", base_model_hash):
        raise ValueError(
            f"the adapters in {folder} were trained beside another model ({stored.beneath[:8]}..., not "
            f"{base_model_hash[:8]}...); bring that back (`dvc checkout --force`)"
        )
    names = expected.keys() | stored.shapes
    wrong = sorted(name for name in names if expected.get(name) != stored.shapes.get(name))
    if wrong:
        stored_shape = stored.shapes.get(wrong[0], "missing")
        model_shape = expected.get(wrong[0], "unknown to the model")
        raise ValueError(
            f"the adapters in {folder} do not fit: {wrong[0]!r} is {stored_shape}, not {model_shape}; {REMEDY}"
        )


def merge(folder: Path, model: str | Path, dtype: torch.dtype) -> None:
    """Merges a policy's adapters, trained beside `model`, into weights in `dtype`. Raises as `load_adapter`."""
    stored = read_stored(folder)
    if stored is None:
        raise ValueError(f"{folder} holds no adapters to merge; {REMEDY}")
    policy = load_policy(model, dtype, torch.device("cpu"))
    attach(policy, stored.params, seed=0)
    load_adapter(policy, stored.params, folder, model_hash(str(model)))
    save_merged(policy, folder)


def warn_of_rounding(settings: Params) -> None:
    """Warns where adapters are sampled with after merging, as servers do, and 16 bits round them."""
    merged = settings.model.adapter is not None and settings.engine.kind == "server"
    if merged and compute_dtype(settings.model.dtype, default_device()) is not torch.float32:
        logger.warning(
            "engine.kind server samples with adapters merged into weights of 16 bits: changes below half a unit in the "
            "last place vanish, and at small learning rates those are most; set another engine.kind, raise "
            "train.update.learning_rate, set model.lora.rank: 0, or model.dtype: float32"
        )


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters of peft, by name."""
    names = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    return {name: model.get_submodule(name) for name in sorted(names)}


def _peft_name(name: str) -> str:
    return "base_model.model." + ".".join(part for part in name.split(".") if part != ADAPTER)


def _shapes_of(model: nn.Module) -> Shapes:
    """The tensors that `save_adapter` writes for a model."""
    return {_peft_name(name): ("F32", list(weight.shape)) for name, weight in trained_state(model).items()}

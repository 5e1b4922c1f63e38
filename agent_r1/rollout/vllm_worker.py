"""What runs inside of vLLM's workers, in processes of our own and in stock servers: `--worker-extension-cls`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm._custom_ops import causal_conv1d_weight_pack, cpu_prepack_moe_weight
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from agent_r1.rollout.engine_wire import read_shape
from agent_r1.weight_sums import Slice, tensor_sum, wrapped

CONVOLUTION = "convolution"
_PROBED = 1 << 22  # elements of a layer's weight that are read back at a time


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a layer's weight that is a slice of one tensor in a Hugging Face folder."""

    name: str  # of the layer there
    rows: slice  # of the layer's weight here
    row: int = 0  # where the slice begins there
    column: int = 0


class WorkerExtension:
    """An extension of vLLM's worker, called by name through `collective_rpc`."""

    model_runner: Any

    def take_weights(self, path: str) -> None:
        """Loads the weights of a Hugging Face folder, and derives output layers and experts anew.

        On a CPU a tied output layer would go on using the old embeddings, and experts would be read in another order
        than the one that their kernel takes.
        """
        model = self.model_runner.get_model()
        experts = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
        methods = [layer.quant_method for layer in experts if layer.w13_weight.device.type == "cpu"]
        for method in methods:
            method.moe_kernel = None
        self.model_runner.reload_weights(weights_path=path)
        if any(method.moe_kernel is None for method in methods):
            raise ValueError("vLLM does not replace the experts of this model on a CPU")
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def describe(self) -> dict[str, Any]:
        """The fields of a `Description`."""
        config = self.model_runner.model_config
        dtype = str(config.dtype).removeprefix("torch.")
        return {**read_shape(config.hf_text_config), "max_tokens": config.max_model_len, "dtype": dtype}

    def weight_sums(self) -> list[Slice]:
        """The sums of the tensors that this worker computes with; of a model with adapters, theirs alone.

        On a CPU a layer computes with a copy in the order of its kernel, and keeps no other. There its matrix product
        with the unit vectors gives the weight, bit for bit.
        """
        model = self.model_runner.get_model()
        layers = dict(model.named_modules())
        fused = getattr(model, "packed_modules_mapping", {})  # some models fuse nothing
        adapted = [(name, layer) for name, layer in layers.items() if isinstance(layer, BaseLinearLayerWithLoRA)]
        if adapted:
            return [entry for name, layer in adapted for entry in _adapter_sums(name, layer, fused)]
        if not any(isinstance(layer, ParallelLMHead) for layer in layers.values()):
            # then the embedding is the output layer too
            layers["lm_head"] = next(layer for layer in layers.values() if isinstance(layer, VocabParallelEmbedding))
        dtype = self.model_runner.model_config.dtype
        return [entry for name, layer in layers.items() for entry in _layer_sums(name, layer, fused, dtype)]


def _layer_sums(name: str, layer: nn.Module, fused: dict[str, list[str]], dtype: torch.dtype) -> Iterator[Slice]:
    """The sums of a layer's own parameters, of which some are wider than the model's `dtype`."""
    if isinstance(layer, RoutedExperts):
        yield from _expert_sums(name.removesuffix(".routed_experts"), layer)
        return
    pieces = _pieces(name, layer, fused)
    for leaf, parameter in layer.named_parameters(recurse=False):
        totals = [0] * len(pieces)
        for start, block in _blocks(name, layer, leaf, parameter):
            for index, piece in enumerate(pieces):
                column = piece.column + start if block.dim() > 1 else 0
                totals[index] += tensor_sum(block[piece.rows].to(dtype), piece.row, column)
        for piece, total in zip(pieces, totals, strict=True):
            yield f"{piece.name}.{leaf}", piece.row, piece.column, wrapped(total)


def _blocks(name: str, layer: Any, leaf: str, parameter: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The columns of a layer's parameter in their own order, some at a time, with the first one's number."""
    is_packed = not parameter.numel() or name.endswith("lm_head")
    if parameter.device.type == "cpu" and leaf == "weight" and is_packed:
        yield from _read_back(layer, parameter.dtype)
        return
    plain = getattr(layer, "_cpu_unpacked_conv_weight", None)  # beside one in the order of a CPU's kernel
    yield 0, parameter if plain is None else _unpacked(parameter, plain.shape, CONVOLUTION)


def _read_back(layer: Any, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """The weight with which a layer computes, whatever it has made of it: some columns at a time, with their first."""
    if isinstance(layer, VocabParallelEmbedding):
        width = layer.embedding_dim
        height = layer.num_embeddings_per_partition
    else:
        width = layer.input_size_per_partition if isinstance(layer, RowParallelLinear) else layer.input_size
        height = sum(layer.output_partition_sizes)
    step = max(1, _PROBED // height)
    for start in range(0, width, step):
        units = torch.eye(min(step, width - start), width, dtype=dtype).roll(start, 1)
        yield start, layer.quant_method.apply(layer, units, None).t().contiguous()


def _expert_sums(name: str, layer: Any) -> Iterator[Slice]:
    """The sums of stacked experts by transformers' names: halves for gate and up, and their way back.

    There are none where a kernel of CUDA has an order of its own, or where halves are interleaved, as beside biases.
    """
    config = layer.moe_config
    if config.has_bias:
        return
    isa = _isa_of(layer.quant_method.moe_kernel.fused_experts)
    if isa is None:
        return
    size = config.intermediate_size_per_partition
    column = config.moe_parallel_config.tp_rank * size
    whole = config.moe_parallel_config.tp_size * size
    for expert, (both, down) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        for half, rows in enumerate(_unpacked(both, both.shape, isa).chunk(2)):
            row = (2 * expert + half) * whole + column
            yield f"{name}.gate_up_proj", row, 0, tensor_sum(rows[:size], row)
        row = expert * len(down)
        yield f"{name}.down_proj", row, column, tensor_sum(_unpacked(down, down.shape, isa)[:, :size], row, column)


def _isa_of(kernel: Any) -> str | None:
    """The instruction set of a CPU whose order a kernel of experts needs, "" for a plain order, None for others."""
    isa: str = getattr(kernel, "isa", "")
    return isa if isa or type(kernel).__name__ == "TritonExperts" else None


def _unpacked(weight: Tensor, shape: torch.Size, isa: str) -> Tensor:
    """A weight in its own order and shape, from the order of a CPU's kernel, which only moves elements and pads.

    Without an `isa` it is in its own order already.
    """
    if not isa:
        return weight
    order = _order(shape, weight.dtype, isa)
    unpacked = weight.new_empty(shape.numel())
    unpacked[order[order >= 0]] = weight.flatten()[order >= 0]
    return unpacked.view(shape)


@functools.cache
def _order(shape: torch.Size, dtype: torch.dtype, isa: str) -> Tensor:
    """The places that the elements of a weight come from, in the order of a CPU's kernel; -1 for padding."""
    places = torch.arange(1, shape.numel() + 1, dtype=torch.int32).view(shape)
    parts = [places] if dtype is torch.float32 else [places & 0x7FFF, places >> 15]  # numbers of as many bits
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    moved = [_packed(part.to(bits).view(dtype), isa).view(bits).long().flatten() for part in parts]
    return torch.stack([part << 15 * at for at, part in enumerate(moved)]).sum(0) - 1


def _packed(weight: Tensor, isa: str) -> Tensor:
    """A weight in the order of a CPU's kernel: of experts for an instruction set, or of convolutions."""
    return causal_conv1d_weight_pack(weight) if isa == CONVOLUTION else cpu_prepack_moe_weight(weight[None], isa)


def _adapter_sums(name: str, layer: Any, fused: dict[str, list[str]]) -> Iterator[Slice]:
    """The sums of a layer's only adapters, by peft's names; the second matrix is scaled. Without any they are 0."""
    pieces = _pieces(name, layer.base_layer, fused)[: layer.n_slices]
    for piece, first, second in zip(pieces, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
        prefix = f"base_model.model.{piece.name}"
        yield f"{prefix}.lora_A.weight", 0, piece.column, tensor_sum(first[0, 0], 0, piece.column)
        yield f"{prefix}.lora_B.weight", piece.row, 0, tensor_sum(second[0, 0], piece.row)


def _pieces(name: str, layer: nn.Module, fused: dict[str, list[str]]) -> list[_Piece]:
    """The slices of a folder's tensors that make up a layer's weight, in their order there."""
    if isinstance(layer, VocabParallelEmbedding):
        size = layer.shard_indices.num_org_elements  # the rest is padding
        return [_Piece(name, slice(size), layer.shard_indices.org_vocab_start_index)]
    if isinstance(layer, RowParallelLinear):
        return [_Piece(name, slice(None), column=layer.tp_rank * layer.input_size_per_partition)]
    if not isinstance(layer, ColumnParallelLinear):
        return [_Piece(name, slice(None))]
    leaf = name.rpartition(".")[2]
    names = fused.get(leaf, [leaf])
    # The first name takes the parts that have none, such as queries, keys and values that are one tensor.
    parts = [names[0]] * (len(layer.output_partition_sizes) - len(names)) + names
    pieces = list[_Piece]()
    start = offset = 0
    for index, size in enumerate(layer.output_partition_sizes):
        replicas = layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) and index else 1
        offset = offset if index and parts[index] == parts[index - 1] else 0
        whole = name.removesuffix(leaf) + parts[index]
        pieces.append(_Piece(whole, slice(start, start + size), offset + layer.tp_rank // replicas * size))
        start += size
        offset += size * (layer.tp_size // replicas)
    return pieces

"""The settings of this package."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from common.config import section


@section
class CompileConfig:
    """torch.compile. Names of parameters stay as they are. evaluate.py does not compile."""

    enabled: Annotated[bool, Field(description="compile the model: slow first steps, faster ones afterwards")] = False
    blocks: Annotated[
        list[str],
        Field(description="modules to compile one by one; empty: fsdp.blocks, activation_checkpointing, or the whole"),
    ] = field(default_factory=list)
    backend: Annotated[str, Field(description="of torch.compile; eager and aot_eager are for debugging")] = "inductor"
    mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        Field(description="of inductor: how long it searches for faster code"),
    ] = "default"
    dynamic: Annotated[bool | None, Field(description="true: one graph for all shapes; false: each; null: auto")] = None
    fullgraph: Annotated[bool, Field(description="error on code that cannot be compiled; false: skip it")] = False


@section
class FsdpConfig:
    """With dist.strategy fsdp: how weights, gradients and optimizer state are sharded over the processes.

    To save, the first process gathers all of them in its host memory.
    """

    blocks: Annotated[
        list[str],
        Field(description='modules gathered one at a time, as in "layers.*"; without any, the whole model at once'),
    ] = field(default_factory=list)
    reshard_after_forward: Annotated[bool, Field(description="free gathered weights until the backward pass")] = True
    param_dtype: Annotated[
        Literal["auto", "bf16", "own"],
        Field(description="format of computation; auto: bf16 with precision.mode bf16 and no batch norm, else own"),
    ] = "auto"
    reduce_dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Field(description="dtype in which gradients are reduced; auto: fp32 if param_dtype is bf16, else unchanged"),
    ] = "auto"
    output_dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Field(description="format of the model's output; auto: fp32 if param_dtype is bf16, so that losses are exact"),
    ] = "auto"
    cpu_offload: Annotated[bool, Field(description="keep weights and optimizer state in host memory: slow")] = False


@section
class PrepareConfig:
    """What happens to the model before it is trained, in this order. Names have patterns: * is any text, dots too."""

    freeze: Annotated[
        list[str],
        Field(description='parameters that are not trained, by full name, as in "backbone.*" or "*.bias"'),
    ] = field(default_factory=list)
    channels_last: Annotated[bool, Field(description="torch.channels_last for 4-D weights: faster on GPUs")] = False
    activation_checkpointing: Annotated[
        list[str],
        Field(description="modules whose forward is recomputed in the backward pass: less memory, more time"),
    ] = field(default_factory=list)
    compile: CompileConfig = field(default_factory=CompileConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)

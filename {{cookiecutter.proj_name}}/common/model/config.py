"""The settings of this package."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from common.config import section


@section
class CompileConfig:
    """torch.compile. Names of parameters stay as they are. evaluate.py does not compile."""

    enabled: Annotated[bool, Field(description="compile the model: the first steps are slow, the others faster")] = (
        False
    )
    blocks: Annotated[
        list[str],
        Field(
            description="modules to compile one by one; empty: those of prepare.fsdp.blocks, else those of "
            "activation_checkpointing, else the whole model at once"
        ),
    ] = field(default_factory=list)
    backend: Annotated[str, Field(description="inductor makes code; eager and aot_eager are for finding mistakes")] = (
        "inductor"
    )
    mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        Field(description="of inductor: how long it searches for faster code"),
    ] = "default"
    dynamic: Annotated[
        bool | None, Field(description="true: one code for all shapes; false: one for each; null: torch decides")
    ] = None
    fullgraph: Annotated[bool, Field(description="refuse what cannot be compiled, instead of leaving it as it is")] = (
        False
    )


@section
class FsdpConfig:
    """With dist.strategy fsdp: how weights, gradients and optimizer state are shared out among the processes.

    To save, the first process gathers the whole of it in its host memory.
    """

    blocks: Annotated[
        list[str],
        Field(
            description='modules that are gathered one at a time, as in "layers.*"; the rest is gathered at once. '
            "Without any, the forward pass needs memory for the whole model"
        ),
    ] = field(default_factory=list)
    reshard_after_forward: Annotated[
        bool, Field(description="blocks: free the gathered weights until the backward pass needs them again")
    ] = True
    param_dtype: Annotated[
        Literal["auto", "bf16", "own"],
        Field(
            description="what weights are gathered and computed in. bf16: without autocast; own: as they are; auto: "
            "bf16 where precision.mode is bf16 and the model has no batch norm, else own"
        ),
    ] = "auto"
    reduce_dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Field(description="what gradients are exchanged in; auto: fp32 where param_dtype is bf16, else as they are"),
    ] = "auto"
    output_dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Field(description="what the model gives; auto: fp32 where param_dtype is bf16, so that losses are exact"),
    ] = "auto"
    cpu_offload: Annotated[
        bool, Field(description="keep weights, gradients and optimizer state in host memory, and update there: slow")
    ] = False


@section
class PrepareConfig:
    """What happens to the model before it is trained, in this order. Names have patterns: * is any text, dots too."""

    freeze: Annotated[
        list[str],
        Field(description='parameters that are not trained, by full name, as in "backbone.*" or "*.bias"'),
    ] = field(default_factory=list)
    activation_checkpointing: Annotated[
        list[str],
        Field(
            description='modules that compute their forward again in the backward pass, as in "layers.*": less memory, '
            "about a third more time"
        ),
    ] = field(default_factory=list)
    compile: CompileConfig = field(default_factory=CompileConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)

"""The settings of this package."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from common.base.parts import sections
from common.config import section


@section
class CompileConfig:
    """torch.compile. Names of parameters stay as they are. evaluate.py does not compile."""

    enabled: Annotated[bool, Field(description="compile the model: slow first steps, faster ones afterwards")] = False
    blocks: Annotated[
        list[str],
        Field(description="modules to compile one by one; empty: activation_checkpointing, or the whole"),
    ] = field(default_factory=list)
    backend: Annotated[str, Field(description="of torch.compile; eager and aot_eager are for debugging")] = "inductor"
    mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        Field(description="of inductor: how long it searches for faster code"),
    ] = "default"
    dynamic: Annotated[bool | None, Field(description="true: one graph for all shapes; false: each; null: auto")] = None
    fullgraph: Annotated[bool, Field(description="error on code that cannot be compiled; false: skip it")] = False


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

    @property
    def gathered(self) -> list[str]:
        """Modules whose weights are gathered one at a time, where a part shards them."""
        return []


if not TYPE_CHECKING:  # to the type checker, the core does not have the keys of parts
    PrepareConfig = section(sections(PrepareConfig))

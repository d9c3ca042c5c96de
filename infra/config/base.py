"""What every section of the settings is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from millrace.infra.log.topics import NAME

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
Scalar = bool | int | float | str


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)

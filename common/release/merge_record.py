"""What `merge.json` may say: the record of a merged model, which anybody may have written."""

import math
import re
from typing import Any

from dpmerge.common.untrusted.kinds import Unfit, brief, exactly, list_of, optional, plain, record, table_of, text

_HASH = text(64, re.compile("[0-9a-f]{64}"))
_TOLD = plain(most=200_000, depth=16, longest=10_000)


def _number(value: Any, path: str) -> None:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Unfit(f"{path} = {brief(value)} is not a finite number")


_INPUT = record({"party": text(255), "sha256": _HASH, "epsilon": optional(_number), "weight": _number})

MERGE_RECORD = record(
    {
        "schema": exactly(1),
        "inputs": list_of(_INPUT, least=1, most=10_000),
        "base_sha256": optional(_HASH),
        "method": text(64),
        "parameters": table_of(text(64), _TOLD, most=64),
        "coefficient": _number,
        "factors": _TOLD,
        "noise": _TOLD,
        "robust": _TOLD,
        "statistics_sha256": optional(_HASH),
        "truncation_error": _number,
        "absent": list_of(text(1000), most=100_000),
        "versions": table_of(text(64), text(64), most=16),
    },
    {"validation": _TOLD},
)

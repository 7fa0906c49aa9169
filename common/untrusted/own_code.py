"""Models and tokenizers are data: no code that lies in a model's folder is run, and nobody is asked whether it may be.

`transformers` asks at the terminal when a folder names code of its own, and runs it after "y". Every loader here gets
`NO_CODE`, and a folder that wants code is refused before it is opened.
"""

from pathlib import Path
from types import MappingProxyType

from dpmerge.common.errors import DpmergeError
from dpmerge.common.untrusted.parsing import MAX_JSON_BYTES
from dpmerge.common.untrusted.reading import read_file

NO_CODE = MappingProxyType({"trust_remote_code": False})
"""Keyword arguments of every `from_pretrained` of a base model, configuration or tokenizer."""

WANTS_CODE = ("auto_map", "custom_pipelines")
_FILES = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def refuse_code(source: str) -> None:
    """Refuse a local model folder whose configuration names code of its own.

    A model of a hub is not looked at here: its loader, given `NO_CODE`, refuses it by itself.

    Raises:
        DpmergeError: DPM-204.
    """
    for path in (Path(source) / name for name in _FILES):
        try:
            text = read_file(path, 64 * MAX_JSON_BYTES, links=True).decode("utf-8", "replace")
        except OSError:
            continue  # no such file; what cannot be read, the loader will say
        if any(f'"{key}"' in text for key in WANTS_CODE):
            problem = f"{path} names code of its own, which dpmerge does not run"
            fix = "choose a model that `transformers` itself knows, or save it without auto_map"
            raise DpmergeError("DPM-204", problem, fix)

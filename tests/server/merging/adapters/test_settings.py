"""The table of adapter settings knows every field of the installed PEFT, and takes exact kinds and values."""

import dataclasses
import json
from typing import Any

import pytest
from peft import LoraConfig

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.settings import MAX_SHOWN, SETTINGS, check_settings, differing

PLAIN = {"peft_type": "LORA", "base_model_name_or_path": "tiny"}


def test_every_field_of_the_installed_peft_is_in_the_table() -> None:
    """A new PEFT that adds a field makes this fail: decide what it means before it is merged."""
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - SETTINGS.keys() == set()


def test_the_table_has_the_defaults_of_the_installed_peft() -> None:
    """What PEFT writes without being told anything passes, and equals a configuration that says nothing."""
    written = json.loads(json.dumps(LoraConfig().to_dict(), default=lambda value: getattr(value, "value", list(value))))
    check_settings(written, "shop")
    assert differing(written, {"peft_type": "LORA"}) == []


@pytest.mark.parametrize("key", SETTINGS)
def test_every_setting_says_why_and_its_default_is_allowed(key: str) -> None:
    setting = SETTINGS[key]
    assert setting.words
    assert setting.why
    assert setting.fix
    assert key == "peft_type" or setting.allowed(setting.default)


STRANGE: list[Any] = [2.5, -1, True, "yes", ["yes"], {"a": 1}, [1], [[1, 2]], 1e308 * 10, "", 0, {"a": "b"}]


@pytest.mark.parametrize("key", [key for key, setting in SETTINGS.items() if setting.use == "off"])
@pytest.mark.parametrize("value", STRANGE, ids=str)
def test_what_must_be_off_has_no_second_form_of_off(key: str, value: Any) -> None:
    with pytest.raises(DpmergeError, match=rf"^DPM-402: shop: {key} = "):
        check_settings(PLAIN | {key: value}, "shop")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 2.0),
        ("r", True),
        ("r", 0),
        ("r", None),
        ("lora_alpha", True),
        ("lora_alpha", "8"),
        ("use_rslora", 1),
        ("use_rslora", None),
        ("fan_in_fan_out", 0),
        ("inference_mode", "true"),
        ("lora_dropout", True),
        ("lora_dropout", 1.5),
        ("rank_pattern", {"q": 2.0}),
        ("rank_pattern", {"q": True}),
        ("alpha_pattern", {"q": "2"}),
        ("rank_pattern", []),
        ("target_modules", ["q", 1]),
        ("target_modules", {"q": 1}),
        ("layers_to_transform", True),
        ("layers_to_transform", [1.0]),
        ("modules_to_save", ["pooler"]),
        ("modules_to_save", "classifier"),
        ("task_type", "CHAT"),
        ("peft_type", "IA3"),
        ("bias", None),
        ("init_lora_weights", 1),
        ("init_lora_weights", ["pissa"]),
        ("init_lora_weights", {"type": "olora"}),
        ("cls", 0),
        ("cls", None),
        ("megatron_core", 1),
        ("\x1b[2J", 0),
    ],
)
def test_another_kind_or_an_unknown_key_is_refused_even_if_it_is_empty(key: str, value: Any) -> None:
    with pytest.raises(DpmergeError, match=r"^DPM-402: shop: ") as caught:
        check_settings(PLAIN | {key: value}, "shop")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "PiSSA"])
def test_a_start_that_changes_the_base_is_refused_with_how_peft_converts_it(start: str) -> None:
    with pytest.raises(DpmergeError, match="takes B A out of the base model's weights") as caught:
        check_settings(PLAIN | {"init_lora_weights": start}, "shop")
    assert "path_initial_model_for_weight_conversion" in caught.value.fix


def test_loftq_is_refused_with_another_remedy() -> None:
    with pytest.raises(DpmergeError, match="cannot convert LoftQ"):
        check_settings(PLAIN | {"init_lora_weights": "loftq"}, "shop")


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_a_start_that_leaves_the_base_alone_is_taken(start: bool | str) -> None:
    check_settings(PLAIN | {"init_lora_weights": start}, "shop")


def test_foreign_text_is_shown_in_ascii_and_short() -> None:
    with pytest.raises(DpmergeError) as caught:
        check_settings(PLAIN | {"x" * 10_000: "\u202e" * 10_000}, "shop")
    assert len(str(caught.value)) < 3 * MAX_SHOWN + 200
    assert str(caught.value).isascii()


def test_settings_are_compared_by_kind_and_absent_ones_count_as_the_default() -> None:
    agreed = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "target_modules": ["a", "b"], "use_rslora": False}
    assert differing({"peft_type": "LORA", "r": 2, "lora_alpha": 16, "target_modules": ["b", "a"]}, agreed) == []
    assert differing(agreed | {"r": 2.0}, agreed) == ["r"]
    assert differing(agreed | {"use_rslora": 0}, agreed) == ["use_rslora"]
    assert differing(agreed | {"lora_alpha": 16.0}, agreed) == ["lora_alpha"]
    assert differing(agreed | {"cls": None}, agreed) == ["cls"]
    assert differing(agreed | {"kasa_config": None}, agreed) == []
    assert differing(agreed | {"target_modules": ["a", "b", "b"]}, agreed) == ["target_modules"]
    assert differing({"r": 2}, agreed) == ["lora_alpha", "peft_type", "target_modules"]

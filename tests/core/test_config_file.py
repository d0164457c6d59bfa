"""Files of settings, whatever is in them: values as they stand there, or one error that says where and what."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardlab.core.config_file import MOST_BYTES, read_config_file
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json

LAUGHS = "a0: &a0 [lol]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))


def said(tmp_path, name, text):
    """The error for a file, without its beginning."""
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        read_config_file(path)
    message = str(error.value)
    assert message.startswith(f"--config {path}: ")
    assert len(message) < 1000
    return message.removeprefix(f"--config {path}: ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", '{"lr": 1,\n "steps": 2,\n "lr": 3}', "line 3: the key 'lr' appears twice. Keep one."),
        ("run.json", '{"a": {"b\\"": 1, "c": [{"b\\"": 1,\n"b\\"": 2}]}}', "line 2: the key 'b\"' appears twice."),
        ("run.json", '{"a": ["a", "a"], "\\u0061": 1}', "line 1: the key 'a' appears twice."),
        ("run.yaml", "lr: 1\nsteps: 2\nlr: 3\n", "line 3: the key 'lr' appears twice. Keep one."),
        ("run.yaml", "a:\n  b: 1\n  b: 2\n", "line 3: the key 'b' appears twice."),
        ("run.yaml", "{a: 1, 'a': 2}", "line 1: the key 'a' appears twice."),
        (
            "run.yaml",
            "a: &a {b: 1}\nc:\n  <<: *a\n  <<: *a\n",
            "line 4: the key '<<' appears twice. Merge a list: <<: [",
        ),
        ("run.toml", "lr = 1\nsteps = 2\nlr = 3\n", "not valid TOML: Cannot overwrite a value (at line 3"),
    ],
)
def test_a_key_that_is_there_twice_is_an_error(tmp_path, name, text, message):
    assert said(tmp_path, name, text).startswith(message)


def test_json_of_our_own_has_every_key_once(tmp_path):
    (tmp_path / "manifest.json").write_text('{"a": 1,\n"a": 2}')
    with pytest.raises(DataError, match=r"manifest\.json: line 2: the key 'a' appears twice"):
        read_json(tmp_path / "manifest.json")


def test_merged_keys_may_be_overridden(tmp_path):
    text = "x: {y: {z: &z {<<: &b {lr: 1, steps: 3}, lr: 2}}}\nc: {<<: *z, steps: 4}\nd: {<<: [*b, *z]}\n"
    (tmp_path / "run.yaml").write_text(text)
    found = read_config_file(tmp_path / "run.yaml")
    assert (found["c"], found["d"]) == ({"lr": 2, "steps": 4}, {"lr": 1, "steps": 3})


@pytest.mark.parametrize(("order", "lr"), [("*a, *b", 1), ("*b, *a", 2)])
def test_of_several_merged_mappings_the_first_that_has_a_key_decides_it(tmp_path, order, lr):
    (tmp_path / "run.yaml").write_text(f"a: &a {{lr: 1}}\nb: &b {{lr: 2, steps: 3}}\nc: {{<<: [{order}], seed: 4}}\n")
    assert read_config_file(tmp_path / "run.yaml")["c"] == {"lr": lr, "steps": 3, "seed": 4}


@pytest.mark.parametrize("merged", ["5", "[*a, 5]", "[[*a]]"])
def test_only_mappings_can_be_merged(tmp_path, merged):
    message = said(tmp_path, "run.yaml", f"a: &a {{lr: 1}}\nb: {{<<: {merged}}}\n")
    assert "expected a mapping or a list of mappings to merge, found a s" in message


@pytest.mark.parametrize("text", ["12:00:00", "1:30", "1:30.5", "010", "-010", "0_7", "00"])
def test_what_yaml_would_read_in_base_8_or_60_is_text(tmp_path, text):
    (tmp_path / "run.yaml").write_text(f"time: {text}\n")
    assert read_config_file(tmp_path / "run.yaml") == {"time": text}


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("0.5", 0.5), ("0x10", 16), ("1_000", 1000), ("-7", -7)])
def test_other_numbers_in_yaml_are_numbers(tmp_path, text, value):
    (tmp_path / "run.yaml").write_text(f"seed: {text}\n")
    assert read_config_file(tmp_path / "run.yaml") == {"seed": value}


@pytest.mark.parametrize(
    "text", ["2001-01-01", "2001-99-99", "2001-1-1 25:61:61", "12:30:45.5", "2024-05-06T07:08:09Z"]
)
def test_a_date_in_yaml_is_text(tmp_path, text):
    (tmp_path / "run.yaml").write_text(f"hf_split: {text}\n")
    assert isinstance(read_config_file(tmp_path / "run.yaml")["hf_split"], (str, float))
    (tmp_path / "run.yaml").write_text("hf_split: 2001-99-99\n")
    assert read_config_file(tmp_path / "run.yaml") == {"hf_split": "2001-99-99"}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{{"a": {opened}{closed}}}'),
        ("run.yaml", "a: {opened}{closed}"),
        ("run.yaml", "a: {opened}"),
        ("run.yaml", "{minuses}a"),
        ("run.toml", "a = {opened}{closed}"),
    ],
)
def test_a_file_of_ten_thousand_levels_is_refused(tmp_path, name, text):
    text = text.format(opened="[" * 10_000, closed="]" * 10_000, minuses="- " * 10_000)
    assert said(tmp_path, name, text).startswith("nested too deep")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "its aliases expand to more than"),
        ("a: &a [*a]\n", "an alias refers to a value that contains it"),
        ("a: &a {b: {c: *a}}\n", "an alias refers to a value that contains it"),
        ("a:\n" + "- b\n" * 20_000, "more than 10,000 values"),
    ],
)
def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, text, message):
    assert message in said(tmp_path, "run.yaml", text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", f'{{"lr": {"9" * 5000}}}'),
        ("run.yaml", f"lr: {'9' * 5000}"),
        ("run.toml", f"lr = {'9' * 5000}"),
        *(
            ("run.yaml", f"a: !!{tag} b")
            for tag in ("int", "float", "bool", "timestamp", "binary é", "set", "omap", "python/object:os.system", "x")
        ),
        ("run.yaml", "? [a, b]\n: c\n"),
        ("run.yaml", "a: =\n"),
        ("run.yaml", "a: \x1b[2J\n"),
        ("run.yaml", "%YAML 9.9\n---\na: 1\n---\nb: 2\n"),
        ("run.yaml", b"a: \xff\xfe\n"),
        ("run.json", b"\x00\x00\x00"),
        ("run.json", b"{} {}"),
        ("run.toml", b"a = \x00"),
        ("run.json", b" " * (MOST_BYTES + 1)),
    ],
    ids=str,
)
def test_what_is_no_setting_is_refused_in_one_message(tmp_path, name, text):
    assert said(tmp_path, name, text)


@pytest.mark.parametrize("name", ["run.json", "run.yaml", "run.toml"])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path, name):
    text = {"run.json": '{"lr": 1}', "run.yaml": "lr: 1", "run.toml": "lr = 1"}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_config_file(tmp_path / name) == {"lr": 1}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), values, max_size=5))
def test_json_says_the_same_as_ever(tmp_path_factory, mapping):
    path = tmp_path_factory.getbasetemp() / "same.json"
    path.write_text(json.dumps(mapping), encoding="utf-8")
    assert read_config_file(path) == mapping


@pytest.mark.parametrize("name", ["any.json", "any.yaml", "any.toml"])
@given(content=st.binary(max_size=200) | st.text("[]{}:,-&*!|>'\"#%@`?~=.\n\t 019eExXabz\x00é").map(str.encode))
def test_any_bytes_are_a_mapping_or_one_error(tmp_path_factory, name, content):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    try:
        assert isinstance(read_config_file(path), dict)
    except ConfigError as error:
        said = str(error)
    else:
        return
    assert said.startswith(f"--config {path}: ")

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from IPython.core.error import UsageError

from torchdebug_magics.instrument import Instrument, Option
from torchdebug_magics.jupyter.arguments import MagicParser, without_comment

if TYPE_CHECKING:
    from pathlib import Path

ROW = Instrument(
    name="look",
    module="torchdebug_magics.instruments.nanhunt",
    summary="s",
    description="Looks.",
    options=(Option("--count", "how many", {"type": int, "default": 3}), Option("--keep-going", "100% of them", {"action": "store_true"})),
    subjects="VALUE",
)
PARSER = MagicParser(ROW)


@pytest.mark.parametrize(
    ("line", "subjects", "options"),
    [
        ("", (), {}),
        ("loss", ("loss",), {}),
        ("model torch.randn(1, 3, 224, 224)", ("model", "torch.randn(1, 3, 224, 224)"), {}),
        ("loss - 1", ("loss - 1",), {}),
        ("model x if y else z", ("model", "x if y else z"), {}),
        ("model (x if y else z)", ("model", "(x if y else z)"), {}),
        ("a not in b", ("a not in b",), {}),
        ("f ('a b') c", ("f", "('a b')", "c"), {}),
        ("'a -q b'", ("'a -q b'",), {}),
        ("x[1:, 2] lambda v: v", ("x[1:, 2]", "lambda v: v"), {}),
        ("--count 5 loss", ("loss",), {"count": 5}),
        ("loss --count=5", ("loss",), {"count": 5}),
        ("loss --keep-going out  # both", ("loss", "out"), {"keep_going": True}),
        ("x == '#'  # not a comment", ("x == '#'",), {}),
        ("d['a # b']", ("d['a # b']",), {}),
    ],
)
def test_a_line_with_values(line: str, subjects: tuple[str, ...], options: dict[str, object]) -> None:
    asked = PARSER.parse(line, subjects=True)
    assert asked.subjects == subjects
    assert asked.options == {"count": 3, "keep_going": False, **options}


@pytest.mark.parametrize(
    ("line", "subjects", "expected"),
    [("--count {n + 1}", False, ((), 5)), ("--count $n", False, ((), 4)), ("d[n] {'a': n} --count $n", True, (("d[n]", "{'a': n}"), 4))],
)
def test_names_stand_for_what_they_hold_but_an_expression_is_python(line: str, subjects: bool, expected: tuple[object, int]) -> None:
    asked = PARSER.parse(line, subjects=subjects, names={"n": 4})
    assert (asked.subjects, asked.options["count"]) == expected


def test_a_line_with_a_name_that_is_not_there_stays_as_it_is() -> None:
    with pytest.raises(UsageError, match=r"'\{no\}'"):
        PARSER.parse("--count {no}", names={"n": 4})


def test_common_flags(tmp_path: Path) -> None:
    asked = PARSER.parse(f"-q -w -o kept --json '{tmp_path}/a b.json'")
    assert (asked.quiet, asked.widget, asked.output, asked.json, asked.help) == (True, True, "kept", tmp_path / "a b.json", False)
    assert PARSER.parse("-h").help


@pytest.mark.parametrize("subjects", [True, False])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--bad", "there is no option '--bad'"),
        ("--keep", r"there is no option '--keep' \(did you mean `--keep-going`\?\)"),
        ("--quite", "did you mean `--quiet`"),
        ("--count many", "invalid int value: 'many'"),
        ("--count", "expected one argument"),
        ("-o 1x", "not a name"),
        ("-o for", "not a name"),
        ("--json nowhere/at/all.json", "cannot be written"),
        ("--json .", "cannot be written"),
        ("--count '3", "No closing quotation"),
    ],
)
def test_what_is_wrong_is_one_line(line: str, said: str, subjects: bool) -> None:
    with pytest.raises(UsageError, match=said) as error:
        PARSER.parse(line, subjects=subjects)
    assert "\n" not in str(error.value)


def test_a_value_where_none_is_taken_says_what_to_write() -> None:
    with pytest.raises(UsageError, match="%look VALUE"):
        PARSER.parse("loss")


def test_half_an_expression() -> None:
    with pytest.raises(UsageError, match="parentheses"):
        PARSER.parse("f(", subjects=True)


def test_help_holds_the_description_and_every_flag() -> None:
    assert "usage: %%look" in PARSER.help
    assert "Looks." in PARSER.help
    assert "100% of them" in PARSER.help
    assert all(flag in PARSER.help for flag in PARSER.flags)
    assert {"--count", "--keep-going", "-o", "--output", "--json", "-h"} <= set(PARSER.flags)


@pytest.mark.parametrize(
    ("line", "left"), [("a # b", "a"), ("# b", ""), ("a#b", "a#b"), ("'# a' # b", "'# a'"), ("a # don't", "a"), (" a ", "a")]
)
def test_comments(line: str, left: str) -> None:
    assert without_comment(line) == left


def test_a_magic_that_takes_no_values_says_so_and_its_flag_may_stand_alone() -> None:
    row = Instrument(
        name="tidy",
        module="torchdebug_magics.instruments.memclean",
        summary="s",
        description="Tidies.",
        options=(Option("--free", "what", {"nargs": "?", "const": "all", "default": ""}),),
    )
    parser = MagicParser(row)
    for line, free in (
        ("", ""),
        ("--free", "all"),
        ("--free out,cache", "out,cache"),
        ("--free=Out[3] -q", "Out[3]"),
        ("--free -q", "all"),
    ):
        asked = parser.parse(line, subjects=True)
        assert (asked.options, asked.subjects) == ({"free": free}, ())
    with pytest.raises(UsageError, match=r"^%tidy: takes no value such as 'loss'; %tidy\? lists what it takes$"):
        parser.parse("loss", subjects=True)
    assert parser.help.startswith("usage: %tidy ")


WITH_WORDS = MagicParser(
    Instrument(
        name="keep", module="torchdebug_magics.instruments.deterministic", summary="s", description="d", lasting="line", subjects='"status"'
    )
)


@pytest.mark.parametrize("word", ["on", "off"])
def test_words_that_stand_on_the_line_by_themselves(word: str) -> None:
    assert WITH_WORDS.parse(f"{word} -q", subjects=True, names={}).word == word
    assert WITH_WORDS.parse("-q", subjects=True).word is None
    assert word in WITH_WORDS.words
    assert word in WITH_WORDS.help
    with pytest.raises(
        UsageError, match=f"takes no value such as '{word}'; on a line of its own, `%keep on`, `%keep off` and `%keep status`"
    ):
        WITH_WORDS.parse(word)
    with pytest.raises(UsageError, match="takes no value such as 'status'"):
        WITH_WORDS.parse(f"{word} status", subjects=True, names={})


def test_a_value_that_is_a_word_needs_no_quotes() -> None:
    for names in ({}, {"status": "ok"}, {"status": 200}):
        assert WITH_WORDS.parse("status -q", subjects=True, names=names).subjects == ("'status'",)
    assert WITH_WORDS.words == ("on", "off", "status")
    assert "%keep status: a report at once" in WITH_WORDS.help

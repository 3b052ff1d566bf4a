"""Legible on light and dark: text has a contrast of 4.5 at least, in the theme's colour or on a background of its own."""

from __future__ import annotations

import re

import pytest

from torchdebug_magics.html import style

ENOUGH = 4.5
ENOUGH_FOR_A_LINE = 3
THEMES = {"light": ((255, 255, 255), (33, 33, 33)), "dark": ((17, 17, 17), (222, 222, 222))}
TINTS = re.findall(r"rgba\([^)]*\)", " ".join(value for value in vars(style).values() if isinstance(value, str)))


def luminance(colour: tuple[float, ...]) -> float:
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def over(tint: str, background: tuple[int, ...]) -> tuple[float, ...]:
    *colour, alpha = (float(part) for part in re.findall(r"[\d.]+", tint))
    return tuple(alpha * part + (1 - alpha) * below for part, below in zip(colour, background, strict=True))


@pytest.mark.parametrize("look", style.STATUS.values(), ids=style.STATUS)
def test_white_on_a_badge_can_be_read(look):
    solid = tuple(int(look.solid[place : place + 2], 16) for place in (1, 3, 5))
    assert contrast((255, 255, 255), solid) >= ENOUGH


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("colour", [style.CHART_LINE, style.CHART_BAD, style.CHART_FRAME])
def test_lines_of_a_chart_are_seen_on_every_theme(theme, colour):
    assert contrast(tuple(bytes.fromhex(colour[1:])), THEMES[theme][0]) >= ENOUGH_FOR_A_LINE


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("tint", sorted({*TINTS, *(look.tint for look in style.STATUS.values())}))
def test_the_themes_text_can_be_read_on_every_tint(theme, tint):
    background, text = THEMES[theme]
    assert contrast(text, over(tint, background)) >= ENOUGH


def test_a_status_is_told_apart_without_colour():
    assert len({look.symbol for look in style.STATUS.values()}) == len({look.word for look in style.STATUS.values()}) == len(style.STATUS)


def test_only_the_badge_sets_a_text_colour():
    coloured = [name for name, value in vars(style).items() if isinstance(value, str) and re.search(r"(^|;)color:", value)]
    assert coloured == ["BADGE"]

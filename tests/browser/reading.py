"""What reads badly in the outputs of a notebook, as the browser draws them: faint text, what is cut off, what is not shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["OUTPUTS", "Complaint", "complaints", "resize", "stand_still"]

OUTPUTS = ".jp-OutputArea-output"
NOT_OURS = "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type='application/vnd.jupyter.stderr'], :has(> pre > .ansi-red-fg)"
"""Tracebacks: IPython chooses their colours, and JupyterLab breaks their lines."""

# Colours fade when a theme is changed: a colour that is read meanwhile is of neither.
STILL = "*, *::before, *::after { transition: none !important; animation: none !important; }"

# The WCAG 2.2 rules for contrast; the colours of text and ground are composed as a browser does, with each layer's opacity.
READ = """([outputs, notOurs, allInSight]) => {
    const rgba = text => {
        const [r, g, b, a = 1] = text.match(/-?[\\d.]+(?:e-?\\d+)?/g).map(Number);
        return text.startsWith('color(') ? [r * 255, g * 255, b * 255, a] : [r, g, b, a];
    };
    const mix = (under, over, share) => under.map((value, at) => value + (over[at] - value) * share);
    const paint = (under, colour) => { const over = rgba(colour); return mix(under, over.slice(0, 3), over[3]); };
    const drawn = (chain, at, under) => {
        const style = getComputedStyle(chain[at]);
        const ground = paint(under, style.backgroundColor);
        const [text, behind] = at + 1 < chain.length ? drawn(chain, at + 1, ground) : [paint(ground, style.color), ground];
        return [mix(under, text, Number(style.opacity)), mix(under, behind, Number(style.opacity))];
    };
    const luminance = colour => {
        const linear = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = colour.map(value => linear(value / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = element => {
        const chain = [];
        for (let one = element; one; one = one.parentElement) chain.unshift(one);
        const [light, dark] = drawn(chain, 0, [255, 255, 255]).map(luminance).sort((a, b) => b - a);
        return (light + 0.05) / (dark + 0.05);
    };
    const wanted = (style, words) => {
        if (/^[■▬]+$/.test(words)) return 3;  // the key of a chart is a graphic, as is the chart
        const size = parseFloat(style.fontSize);
        return size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    };
    const scrolls = element => ['auto', 'scroll'].includes(getComputedStyle(element).overflowX);
    const inScroller = (element, output) => {
        for (let one = element.parentElement; one && output.contains(one); one = one.parentElement) if (scrolls(one)) return true;
        return false;
    };
    const said = [];
    [...document.querySelectorAll(outputs)].forEach((output, number) => {
        const complain = (what, element, words) => said.push([number, what, element.tagName.toLowerCase(),
            (words ?? element.innerText ?? '').trim().replace(/\\s+/g, ' ').slice(0, 60)]);
        if (output.innerText.includes('Error displaying widget')) complain('a dead widget', output);
        if (notOurs && output.matches(notOurs)) return;
        for (const fold of output.querySelectorAll('details')) fold.open = true;
        const box = output.getBoundingClientRect();
        for (const element of [output, ...output.querySelectorAll('*')]) {
            const style = getComputedStyle(element), place = element.getBoundingClientRect();
            if (element.tagName === 'IMG') {
                if (!element.alt.trim()) complain('an image without words', element);
                const shown = element.complete && element.naturalWidth && place.width && place.height;
                if (!shown) complain('an image that is not shown', element, element.alt);
            }
            if (!element.checkVisibility({visibilityProperty: true}) || !place.width || !place.height) continue;
            if (element.tagName === 'METER' || element.tagName === 'PROGRESS') continue;  // drawn by the browser, words stand beside it
            const words = [...element.childNodes].filter(node => node.nodeType === Node.TEXT_NODE).map(node => node.data).join(' ').trim();
            if (words) {
                const is = contrast(element);
                if (is < wanted(style, words)) complain(`faint: ${is.toFixed(2)}:1`, element, words);
            }
            if (element.clientWidth && element.scrollWidth > element.clientWidth + 1 && !scrolls(element)) {
                const cell = ['TD', 'TH'].includes(element.tagName);
                const seen = !cell && inScroller(element, output);
                if (!seen) complain(`cut off: ${element.scrollWidth} wide in ${element.clientWidth}`, element);
            }
            if (allInSight && element.tagName !== 'PRE' && scrolls(element) && element.scrollWidth > element.clientWidth + 1) {
                complain(`must be scrolled: ${element.scrollWidth} wide in ${element.clientWidth}`, element);
            }
            if (element.scrollHeight > element.clientHeight + 1 && element.clientHeight && style.overflowY === 'hidden') {
                complain(`cut off below: ${element.scrollHeight} high in ${element.clientHeight}`, element);
            }
            const outside = place.left < box.left - 1 || place.right > box.right + 1;
            if (outside && !inScroller(element, output)) complain('outside its output', element);
        }
    });
    return said;
}"""


@dataclass(frozen=True)
class Complaint:
    """What reads badly, and where: the number of the output on the page, from 0."""

    output: int
    what: str
    element: str
    words: str


def stand_still(page: Page) -> None:
    """No colour fades on this page."""
    page.add_style_tag(content=STILL)


def resize(page: Page, width: int, height: int = 1000) -> None:
    """And wait until JupyterLab, which hears of it later, has drawn all anew."""
    page.set_viewport_size({"width": width, "height": height})
    page.evaluate("() => new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 200))")


def complaints(page: Page, *, all_in_sight: bool) -> list[Complaint]:
    """All that reads badly in the outputs that a page shows; their folds are opened.

    Where the page is wide enough for `all_in_sight`, no table may have to be scrolled; code may.
    """
    return [Complaint(*row) for row in page.evaluate(READ, [OUTPUTS, NOT_OURS, all_in_sight])]

"""The page of `mimo data doctor`: one file that needs no other, readable in the light and the dark.

Keys and texts are a stranger's: the template escapes all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from data.media.image_files import thumbnail_url
from mimo.errors import InputError
from mimo.hf.recipes import load_phases
from mimo.step.doctor import Rendered, examine

_THUMBNAIL = 240  # pixels
_SHOWN_TEXT = 4000  # characters of a sample
_WIDTH, _HEIGHT = 240, 72  # of a chart

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Data of {{ reports[0].figures.recipe }}</title>
<style>
:root { color-scheme: light dark; --line: #8885; --faint: #888; --mark: #c77700;
  --learned: #2a9d5c33; font: 15px/1.45 system-ui, sans-serif }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1, h2, h3 { line-height: 1.2 } h2 { border-bottom: 1px solid var(--line); margin-top: 2.5rem }
table { border-collapse: collapse; margin: .5rem 0 }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; font-variant-numeric: tabular-nums;
  vertical-align: top }
td:first-child, th:first-child, .words { text-align: left; overflow-wrap: anywhere }
.tiles, .charts { display: flex; flex-wrap: wrap; gap: 1rem }
.tile { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem }
.tile b { display: block; font-size: 1.4rem }
figure { margin: 0; width: 17rem } figcaption, small { color: var(--faint); font-size: .85rem }
svg { width: 100%; overflow: visible; fill: #3b7dd8 }
.sample { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem; margin: 1rem 0 }
.sample img { max-width: 15rem; max-height: 15rem; margin: .2rem; vertical-align: top }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0; color: var(--faint) }
.learned { color: CanvasText; background: var(--learned) }
.special { color: var(--mark); font-weight: 600 }
</style>
<h1>Data of {{ reports[0].figures.recipe }}</h1>
{% for report in reports %}{% set f = report.figures %}{% set p = f.packing %}
{% if reports|length > 1 %}<h2>{{ report.title }}</h2>{% endif %}

<div class="tiles">
{% for name, value in report.tiles %}<div class="tile"><b>{{ value }}</b>{{ name }}</div>
{% endfor %}</div>
{% if f.looked_at < f.samples %}<p>Figures are of {{ "{:,}".format(f.looked_at) }} samples in random
places, mixed as training mixes them.</p>{% endif %}
<h3>What samples hold</h3>
<table><tr><th></th><th>samples</th><th>tokens</th><th>rows</th></tr>
{% for one in f.modality_mix %}<tr><td>{{ one.holds }}</td>
{% for share in (one.samples, one.tokens, one.rows) %}<td>{{ "%.1f" % (100 * share) }} %</td>
{% endfor %}</tr>
{% endfor %}</table>
<h3>Lanes</h3>
<p>The most loaded lane by the mean of those that wait for each other, in {{ p.steps }} planned
step{{ "s" if p.steps > 1 }}: 1.00 is even; at 1.10 they all take a tenth longer than they need.</p>
<table><tr><th></th><th>mean</th><th>worst</th></tr>
{% for name, one in p.imbalance.items() %}<tr><td>{{ name }}</td><td>{{ "%.2f" % one.mean }}</td>
<td>{{ "%.2f" % one.worst }}</td></tr>
{% endfor %}</table>
<h3>How large</h3>
<div class="charts">
{% for name, chart in report.charts %}<figure><figcaption>{{ name }}</figcaption>
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="{{ name }}">
{% for bar in chart.bars %}<rect x="{{ bar.x }}" y="{{ bar.y }}" width="{{ bar.width }}"
 height="{{ bar.height }}"><title>{{ bar.title }}</title></rect>
{% endfor %}</svg>
<small>{{ chart.least }} to {{ chart.most }}, median {{ chart.median }}, 99 % below
 {{ chart.percentile_99 }}</small></figure>
{% endfor %}</div>
<h3>The largest samples</h3>
<table><tr><th>key</th><th>tokens</th><th>rows</th><th class="words">shard</th></tr>
{% for one in f.largest %}<tr><td>{{ one.key }}</td><td>{{ one.tokens }}</td><td>{{ one.rows }}</td>
<td class="words">{{ one.shard }}</td></tr>
{% endfor %}</table>
<h3>Bad samples</h3>
<p>{{ f.bad.in_index }} are left out by the index. Of {{ f.bad.read }} others that were read in
random places, {{ f.bad.unreadable }} cannot be used.</p>
{% if f.bad.named %}<table>
<tr><th>key</th><th class="words">why</th><th class="words">shard</th></tr>
{% for one in f.bad.named %}<tr><td>{{ one.key }}</td><td class="words">{{ one.reason }}</td>
<td class="words">{{ one.shard }}</td></tr>
{% endfor %}</table>{% endif %}
<h3>Samples as the model sees them</h3>
<p><span class="learned">What the model learns to write</span>,
<span class="special">special tokens</span>, and in grey what the loss leaves out.</p>
{% for one in report.samples %}<div class="sample"><b>{{ one.key }}</b>
<small>{{ one.shard }} · {{ one.tokens }} tokens, {{ one.loss_tokens }} learned</small>
<div>{% for url in one.pictures %}<img src="{{ url }}" alt="">{% endfor %}</div>
<pre>{% for piece in one.pieces %}<span class="{{ piece.kind }}">{{ piece.text }}</span>
{%- endfor %}</pre></div>
{% endfor %}{% endfor %}</html>
"""


def render(reports: Sequence[tuple[str, tuple[dict[str, Any], list[Rendered]]]]) -> str:
    """The page of the reports of phases by title: figures and samples as of `examine`."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    shown = [
        {
            "title": title,
            "figures": figures,
            "tiles": _tiles(figures),
            "charts": _charts(figures),
            "samples": [_sample(one) for one in samples],
        }
        for title, (figures, samples) in reports
    ]
    return environment.from_string(_PAGE).render(reports=shown, width=_WIDTH, height=_HEIGHT)


def _tiles(figures: dict[str, Any]) -> list[tuple[str, str]]:
    packing = figures["packing"]
    found = [(name, f"{figures[name]:,}") for name in ("samples", "items", "shards")]
    found += [
        ("tokens per sample", f"{figures['tokens_per_sample']:,.0f}"),
        ("of tokens count in the loss", f"{figures['loss_token_fraction']:.1%}"),
        ("tokens per microbatch of a lane", f"{packing['tokens_per_microbatch']['mean']:,.0f}"),
        ("of a microbatch is real tokens", f"{packing['full']:.1%}"),
        ("samples per step", f"{packing['samples_per_step']:,.0f}"),
        ("encoder imbalance", f"{packing['encoder_imbalance']:.2f}"),
        ("bad samples", f"{figures['bad']['in_index'] + figures['bad']['unreadable']:,}"),
    ]
    if packing["of_budget"] is not None:
        found.append(("of the token budget is used", f"{packing['of_budget']:.1%}"))
    return found


def _charts(figures: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    named = figures["histograms"] | {
        "tokens of a lane's microbatch": figures["packing"]["tokens_per_microbatch"]
    }
    return [(name, _chart(one)) for name, one in named.items()]


def _chart(histogram: dict[str, Any]) -> dict[str, Any]:
    counts, edges = histogram["counts"], histogram["edges"]
    width, highest = _WIDTH / len(counts), max(counts)
    bars = []
    for place, count in enumerate(counts):
        height = max(_HEIGHT * count / highest, 1.0 if count else 0.0)
        title = f"{_number(edges[place])} to {_number(edges[place + 1])}: {count:,}"
        bar = {"x": place * width, "y": _HEIGHT - height, "width": width * 0.9, "height": height}
        bars.append({key: round(value, 2) for key, value in bar.items()} | {"title": title})
    numbers = ("least", "median", "percentile_99", "most")
    return {"bars": bars} | {name: _number(histogram[name]) for name in numbers}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def _sample(one: Rendered) -> dict[str, Any]:
    """What is shown of a sample; its text may be cut in the middle."""
    shown, left = [], _SHOWN_TEXT
    for piece in one.pieces:
        text = piece.text + (f" × {piece.times} " if piece.times > 1 else "")
        if len(text) > left:
            text = text[:left] + " …"
        kind = "special" if piece.special else "learned" if piece.learned else "masked"
        shown.append({"text": text, "kind": kind + " learned" * (piece.learned and piece.special)})
        left -= len(text)
        if left <= 0:
            break
    pictures = [thumbnail_url(picture, _THUMBNAIL) for picture in one.pictures]
    return vars(one) | {"pieces": shown, "pictures": pictures}


def main(
    path: Path, overrides: Sequence[str], num_ranks: int | None, page: Path, figures: Path | None
) -> int:
    """`mimo data doctor`: write the page, and the figures as JSON, of every phase."""
    phased = load_phases(path, overrides)
    found = phased.each(lambda recipe: examine(recipe, num_ranks))
    titles = [phase.title or phase.recipe.name for phase in phased.phases]
    texts: Mapping[Path | None, Any] = {
        page: render(list(zip(titles, found, strict=True))),
        figures: json.dumps([figures for figures, _ in found], indent=1) + "\n",
    }
    for file, text in texts.items():
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise InputError(f"{file} cannot be written ({error.strerror})") from error
            print(f"written: {file}")
    return 0

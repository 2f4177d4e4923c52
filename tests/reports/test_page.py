"""The page of `prb report`: one file, everything escaped, texts only where they are still what was scored."""

import contextlib
import csv
import json
import re
import runpy
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import prb_jax
from prb_jax import cli
from prb_jax.errors import DataError, PrbWarning, RunError
from prb_jax.reports.page import visible
from prb_jax.reports.report import report
from prb_jax.reports.table import gained, percent
from tests.json_lines import write_lines
from tests.reports.browser import BROWSER, open_page
from tests.reports.conftest import evaluate

HOSTILE = "</script><script>alert(1)</script> <img src=x onerror=alert(2)> & \"q\" 'q' \x00\x1b[31m \u202eabc"


def records(n: int, **more):
    """Pairs of eight users and two subsets; the first response is better, and often the longer one."""
    for i in range(n):
        yield {
            "id": f"p{i}",
            "user_id": f"user {'abcdefgh'[i % 8]}",
            "subset": ("food", "travel")[i % 2],
            "question": f"Question {i}?",
            "chosen": "good " * (1 + i % 7),
            "rejected": "bad " * (1 + i % 5),
            "profile": [{"id": str(n), "category": "c", "text": f"post {n}"} for n in range(i % 4)],
            **more,
        }


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text within each kind."""

    def __init__(self, page) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        for tag in set(self._open):
            self.texts[tag] = self.texts.get(tag, "") + data


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on hostile data, and the page that the command line made of them."""
    folder = tmp_path_factory.mktemp("report")
    rows = list(records(60))
    hostile = ("question", "chosen", "user_id", "subset")
    rows[0] |= dict.fromkeys(hostile, HOSTILE) | {"rejected": HOSTILE * 3}
    rows[1] |= {
        "rubric_aspects": [{"aspect": "SENTINEL-ASPECT", "evidence": "e", "reason": "r"}],
        "narrative": "SENTINEL-NARRATIVE",
        "rejected": "bad " * 50,
    }
    write_lines(folder / "pairs.jsonl", rows)
    with contextlib.chdir(folder):
        for name in ("length", "random"):
            assert cli.main(["evaluate", f"baseline:{name}", "--data", "pairs.jsonl", "--out", name]) == 0
        assert cli.main(["report", "length", "random", "--out", "page.html"]) == 0
    return folder


def test_the_page_needs_nothing_else(runs):
    text = (runs / "page.html").read_text(encoding="utf-8")
    elements = Elements(runs / "page.html").all
    tags = [tag for tag, _ in elements]
    assert tags.count("script") == 1
    assert not {"iframe", "object", "img"} & set(tags)
    for tag, attributes in elements:
        for name in ("src", "href", "xlink:href", "action"):
            value = attributes.get(name) or "#"
            assert value.startswith("#") or value == "data:,", (tag, value)
        assert not [name for name in attributes if name.startswith("on")], attributes
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "://" not in without_names
    assert "default-src 'none'" in text


def test_hostile_text_stays_text_and_has_no_effect(runs):
    assert visible("a\r\nb\tc\x00\x9f\u202e\ud800") == "a\nb\tc" + r"\x00\x9f\u202e\ud800"
    text = (runs / "page.html").read_text(encoding="utf-8")
    assert "alert(1)" in text  # it is there to be read
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert r"\x00\x1b[31m \u202eabc" in text


def test_the_figures_are_those_of_the_runs(runs):
    text = re.sub(r"\s+", " ", Elements(runs / "page.html").texts["main"])
    for name in ("length", "random"):
        summary = json.loads((runs / name / "summary.json").read_text())
        low, high = summary["ci95"]
        assert f"{summary['accuracy']:.3f} [{low:.3f}..{high:.3f}]" in text
        users = csv.DictReader((runs / name / "users.csv").read_text().splitlines())
        user = next(user for user in users if user["ci95_low"])
        share, *ends = (float(user[key]) for key in ("accuracy", "ci95_low", "ci95_high"))
        assert f"{share:.3f} [{ends[0]:.3f}..{ends[1]:.3f}]" in text
    compared = prb_jax.compare(runs / "length", runs / "random")
    first, second = compared["runs"]
    difference = gained(compared["pairs"][0]["difference"], compared["pairs"][0]["ci95"])
    assert f"{first['name']}" in text.split(" [")[0]
    assert f"{first['accuracy']:.3f} [" in text
    assert f"ahead of {second['name']} by {difference}" in text
    for heading in (
        "All runs", "By subset", "By user", "Accuracy of each user", "Margins", "Reliability diagram",
        "expected calibration error",
        "Length bias", "Accuracy by number of posts", "Ties and cut text", "Pairs to read", "Manifest: run.json",
        "prb evaluate baseline:length --data pairs.jsonl --out length",
    ):  # fmt: skip
        assert heading in text, heading


def test_reasons_stand_only_where_people_alone_read(runs):
    text = (runs / "page.html").read_text(encoding="utf-8")
    blocks = re.findall(r'<details class="human-only">.*?</details>', text, flags=re.DOTALL)
    for sentinel in ("SENTINEL-ASPECT", "SENTINEL-NARRATIVE"):
        assert text.count(sentinel) == sum(block.count(sentinel) for block in blocks) > 0
    assert all("No model saw this" in block for block in blocks)


def test_the_same_runs_give_the_same_bytes(runs):
    report([runs / "length", runs / "random"], out=runs / "again.html", data=runs / "pairs.jsonl")
    assert (runs / "again.html").read_bytes() == (runs / "page.html").read_bytes()


def test_texts_that_changed_are_not_shown(runs, tmp_path, prb, monkeypatch):
    moved = write_lines(tmp_path / "pairs.jsonl", records(60))
    page = tmp_path / "page.html"
    with pytest.raises(DataError, match=r"pairs\.jsonl: not the data of the run .*length"):
        report(runs / "length", out=page, data=moved)
    monkeypatch.chdir(tmp_path)
    assert prb("report", runs / "length", "--out", "page.html") == "written to page.html\n"
    text = page.read_text(encoding="utf-8")
    assert "the data have changed since they were scored (pairs.jsonl)" in text
    assert "Question 3?" not in text
    assert "p3" in text
    (tmp_path / "pairs.jsonl").unlink()
    assert prb_jax.report(runs / "length", out=page) == page
    assert "the data cannot be read now" in page.read_text(encoding="utf-8")


def test_what_is_no_finished_run_is_refused(runs, tmp_path, prb):
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "run.json").write_bytes((runs / "length" / "run.json").read_bytes())
    for arguments, message in (
        ([tmp_path / "nothing"], "nothing: no such folder; expected the folder of a run"),
        ([begun], "begun: the run is not finished: it has no summary.json"),
        ([runs / "length", runs / "length"], "length: given twice, also as"),
    ):
        assert message in prb("report", *arguments, "--out", tmp_path / "page.html", status=2)
    with pytest.raises(RunError, match=r"page\.txt: expected a name that ends in \.html"):
        report(runs / "length", out=tmp_path / "page.txt")
    assert not list(tmp_path.glob("*.html"))


def test_learning_curves_of_a_training_run(tmp_path):
    command = ["prb", "train", "a b.py", "--out", "trained"]
    inputs = {"settings": {}, "model": {}, "data": {}}
    write_lines(tmp_path / "train.json", [{"kind": "prb_jax training", "inputs": inputs, "command": command}])
    steps = ({"step": n, "loss": 1 / n, "accuracy": 0.5, "margin": 0.1} for n in range(1, 9))
    write_lines(tmp_path / "metrics.jsonl", steps)
    text = report(tmp_path, out=tmp_path / "page.html").read_text(encoding="utf-8")
    for part in (
        "The training run is not finished", "over 8 steps", "prb train &#39;a b.py&#39; --out trained",
    ):  # fmt: skip
        assert part in text
    figures = {"loss": 0.4, "accuracy": 0.875, "margin": 1.0}
    summary = {
        "steps": 8, "exported_step": 6, "train_comparisons": 90, "validation_comparisons": 1234, "pairs_seen": 64,
        "tokens_seen": 999, "parameters": 10, "trained_parameters": 10, "last_tenth": figures,
        "validation": figures | {"accuracy": 0.75},
    }  # fmt: skip
    for validation, answer in (
        (
            summary["validation"],
            "After 8 steps the model prefers the chosen response in 75.0 % of 1,234 comparisons that were held out, "
            "and in 87.5 % of the last tenth of its training; the model of step 6 was exported.",
        ),
        (
            None,
            "After 8 steps the model prefers the chosen response in 87.5 % of the last tenth of its training; no "
            "comparisons were held out; the model of step 6 was exported.",
        ),
    ):
        write_lines(tmp_path / "summary.json", [summary | {"validation": validation}])
        text = report(tmp_path, out=tmp_path / "page.html").read_text(encoding="utf-8")
        assert f'<p class="answer">{answer}</p>' in text
        assert re.findall(r'<svg [^>]*aria-label="([^"]*)"', text) == ["Loss", "Accuracy", "Mean margin"]
        # one figure explains the lines, and a phone shows the figures below each other
        assert text.count(">chance</text>") == 1


def test_the_picture_of_the_documentation_is_the_first_screen(runs, tmp_path):
    page = report(runs / "length", out=tmp_path / "page.html").read_text(encoding="utf-8")
    picture = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "report_picture.py"))["picture"](page)
    svg = ElementTree.fromstring(picture)
    name = {"svg": "http://www.w3.org/2000/svg"}
    texts = [text.text for text in svg.iterfind(".//svg:text", name)]
    summary = json.loads((runs / "length" / "summary.json").read_text())
    share, (low, high) = summary["accuracy"], summary["ci95"]
    told = " ".join(filter(None, texts[:3]))
    assert told.startswith(f"baseline:length prefers what the user wants in {percent(share, (low, high))}")
    assert f"{share:.3f} [{low:.3f}..{high:.3f}]" in texts
    assert "prefers-color-scheme: dark" in picture


def test_without_matplotlib_a_page_has_its_figures_and_one_line_says_what_is_missing(
    runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(runs)
    page = tmp_path / "page.html"
    assert cli.main(["report", "length", "random", "--out", str(page)]) == 0
    lacking = "needs matplotlib, which is not installed: pip install 'prb-jax[report]'"
    assert capsys.readouterr().err == f"prb: warning: left out: the pictures of the page: {lacking}\n"
    elements, whole = Elements(page), Elements(runs / "page.html")
    drawn, without = (
        [attributes.get("class") for tag, attributes in page.all if tag == "svg"]
        for page in (whole, elements)
    )
    assert set(drawn) == {"forest", None}
    assert without == [name for name in drawn if name]  # forest plots need no library
    assert f"There is no picture, as it {lacking}" in elements.texts["p"]
    assert elements.texts["td"] == whole.texts["td"]
    assert "comparisons are right (margin above 0)" in elements.texts["p"]
    write_lines(
        tmp_path / "train.json",
        [{"kind": "prb_jax training", "inputs": {"settings": {}, "model": {}, "data": {}}, "command": []}],
    )
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1, "accuracy": 0.5, "margin": 0.1}])
    with pytest.warns(PrbWarning, match="left out: the pictures of the page"):
        assert "over 1 steps" in report(tmp_path, out=page).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_page_of_ten_thousand_comparisons_is_small(tmp_path):
    long = {"chosen": "word & " * 200, "rejected": "<b> " * 400}
    rows = [row | {"user_id": f"u{i % 5000}"} for i, row in enumerate(records(10_000, **long))]
    write_lines(tmp_path / "pairs.jsonl", rows)
    evaluate("baseline:random", tmp_path / "pairs.jsonl", tmp_path / "run")
    page = report(tmp_path / "run", out=tmp_path / "page.html")
    assert page.stat().st_size < 3_000_000
    text = page.read_text(encoding="utf-8")
    assert "The 1,000 lowest and the 1,000 highest of 5,000 rows." in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_in_a_browser(runs):
    """The page renders without a complaint, sorts by mouse and keyboard, filters, and follows the dark."""
    with open_page(runs / "page.html", dark=True) as page:
        folded = "[...document.querySelectorAll('details.fold')]"
        assert (
            page.evaluate(f"{folded}.filter((d) => d.open).length") == 0
        )  # an answer and pictures come first
        page.evaluate(f"{folded}.forEach((d) => {{ d.open = true; }})")
        table = "[...document.querySelectorAll('table')].find((t) => t.caption.textContent === 'Users')"
        column = f"[...{table}.tBodies[0].rows].filter((r) => !r.hidden).map((r) => Number(r.cells[1].textContent))"
        counts = page.evaluate(column)
        assert len(counts) == 9  # one user has a hostile name
        page.evaluate(f"{table}.tHead.rows[0].cells[1].querySelector('button').focus()")
        page.key("Enter")
        assert page.evaluate(column) == sorted(counts, reverse=True)
        assert page.evaluate(f"{table}.tHead.rows[0].cells[1].getAttribute('aria-sort')") == "descending"
        page.evaluate(f"{table}.tHead.rows[0].cells[1].querySelector('button').click()")
        assert page.evaluate(column) == sorted(counts)

        pairs = "document.querySelector('[data-pairs]')"
        shown = f"[...{pairs}.querySelectorAll('.pair')].filter((p) => p.checkVisibility())"
        assert page.evaluate(f"{shown}.length") == 20  # the worst; the others on request
        assert page.evaluate(f"{pairs}.querySelector('.question').textContent").startswith("Question ")
        page.evaluate(f"{pairs}.querySelector('[data-show-all]').click()")
        assert page.evaluate(f"{shown}.length") == 60
        chosen = (
            "((name, value) => { const s = document.querySelector(`[data-filter=${name}]`); s.value = value; "
            "s.dispatchEvent(new Event('change')); return s.selectedIndex; })"
        )
        assert page.evaluate(f"{chosen}('subset', 'travel')") > 0
        assert page.evaluate(f"new Set({shown}.map((p) => p.dataset.subset)).size") == 1
        assert page.evaluate(f"{shown}.length") == 30
        assert page.evaluate(f"{chosen}('user', 'user b')") > 0
        assert page.evaluate(f"{shown}.map((p) => p.dataset.user + p.dataset.subset)") == ["user btravel"] * 8
        assert page.evaluate(f"{pairs}.querySelector('output').textContent") == "8 of 60 shown"
        page.evaluate(f"{chosen}('subset', '')"), page.evaluate(f"{chosen}('user', '')")
        hostile = visible(HOSTILE)
        assert page.evaluate(f"{chosen}('user', {json.dumps(hostile)})") > 0
        assert page.evaluate(f"{shown}.map((p) => p.dataset.user)") == [hostile]

        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        ink = page.evaluate("getComputedStyle(document.body).color")
        texts = "[...document.querySelectorAll('svg text:not(.number, .remark)')]"
        fills = f"[...new Set({texts}.map((t) => getComputedStyle(t).fill))]"
        assert page.evaluate(fills) == [ink]  # black letters cannot be read in the dark
        page.evaluate("document.querySelector('[data-theme-switch]').click()")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        nameless = "[...document.querySelectorAll('svg, table, [role=region]')].filter((e) => !(e.ariaLabel "
        nameless += "|| e.caption || document.getElementById(e.getAttribute('aria-labelledby')))).length"
        assert page.evaluate(nameless) == 0
        assert page.evaluate("document.querySelectorAll('svg').length") >= 8
        ids = page.evaluate("[...document.querySelectorAll('main > article > h2, caption')].map((e) => e.id)")
        assert len(ids) == len(set(ids))
        assert page.complaints == []
        assert page.requests == [(runs / "page.html").as_uri()]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_on_a_narrow_screen_words_stay_words_and_the_page_does_not_scroll(runs):
    with open_page(runs / "page.html", width=390) as page:
        top = "document.querySelector('svg.forest').getBoundingClientRect().top"
        assert page.evaluate("document.querySelector('main').firstElementChild.className") == "answer"
        assert page.evaluate(top) < 500  # the picture begins on the first screen
        apart = """[...document.querySelectorAll('svg.forest g')].every((row) => {
          const figure = row.querySelector('.estimate').getBoundingClientRect();
          const labels = [...row.querySelectorAll('text:not(.estimate)')].map((t) => t.getBoundingClientRect());
          const beside = (label) => label.right < figure.left || label.top >= figure.bottom - 4;
          return figure.right <= 390 && labels.every((label) => label.right < 390 && beside(label));
        })"""
        assert page.evaluate(apart)
        page.evaluate("document.querySelectorAll('details.fold').forEach((d) => { d.open = true; })")
        widths = (
            "[...document.querySelectorAll('tbody th.words')].map((c) => c.getBoundingClientRect().width)"
        )
        assert min(page.evaluate(widths)) >= 100
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        letters = "[...document.querySelectorAll('svg[viewBox]')].map((s) => s.getBoundingClientRect().width"
        assert min(page.evaluate(f"{letters} / s.viewBox.baseVal.width)")) >= 0.88  # of 10 points: 9 pixels


def test_runs_of_one_model_are_told_apart_by_what_differs(runs, tmp_path):
    folders = [tmp_path / "r0", tmp_path / "r2", runs / "length"]
    for folder, posts in zip(folders, (0, 2), strict=False):
        shutil.copytree(runs / "random", folder)
        record = json.loads((folder / "run.json").read_text())
        record["inputs"]["profile_posts"] = posts
        (folder / "run.json").write_text(json.dumps(record))
    page = report(folders, out=tmp_path / "page.html", data=runs / "pairs.jsonl")
    named = "r0: baseline:random, 0 postsr2: baseline:random, 2 postslength: baseline:length"
    assert f"All runs{named}" in Elements(page).texts["nav"].replace("\n", "")
    differing = {run["name"]: run["differs"] for run in prb_jax.compare(*folders)["runs"]}
    assert differing == {"r0": "0 posts", "r2": "2 posts", "length": ""}


def test_controls_stand_beside_the_model(tmp_path):
    data = write_lines(
        tmp_path / "pairs.jsonl", records(12, profile=[{"id": "1", "category": "", "text": "good"}])
    )

    def knows(comparison):
        return [float(len(comparison.profile)) * (k == 0) for k in range(2)]

    summary = evaluate(knows, data, tmp_path / "run", name="knows", controls="blind")
    assert summary["controls"]["blind"]["accuracy"] == 0.0
    text = Elements(report(tmp_path / "run", out=tmp_path / "page.html")).texts["main"]
    assert "knows prefers what the user wants in 100.0 %" in text
    assert "; the profile is worth +1.000" in text
    assert "knows, shown no profile" in text
    assert "Knowing this user gains +1.000" in text


def test_a_sweep_of_posts_is_drawn(runs, tmp_path):
    sweep, points = tmp_path / "sweep", []
    for posts, name in ((0, "length"), (4, "random")):
        shutil.copytree(runs / name, sweep / f"posts-{posts}")
        summary = json.loads((runs / name / "summary.json").read_text())
        points.append(summary | {"profile_posts": posts, "accuracy": 0.987, "difference": 0.654})
    write_lines(sweep / "posts.json", [{"points": points}])
    page = report(sweep, out=tmp_path / "page.html", data=runs / "pairs.jsonl")
    text = Elements(page).texts["main"]
    length, random = (json.loads((runs / name / "summary.json").read_text()) for name in ("length", "random"))
    difference = f"{random['accuracy'] - length['accuracy']:+.3f}"
    for shown in ("sweep: accuracy by posts shown", difference, "posts-4: baseline:random"):
        assert shown in text
    assert "0.987" not in text  # the figures are those of the rows
    assert "0.654" not in text
    for text, message in (
        ("{}", "field 'points': expected a list, found nothing"),
        ('{"points": [{"profile_posts": "../x"}]}', "profile_posts': expected a whole number"),
        ('{"points": [{"profile_posts": 1}, {"profile_posts": 1}]}', "expected two numbers of posts"),
    ):
        (sweep / "posts.json").write_text(text)
        with pytest.raises(
            RunError, match=rf"posts\.json: not of `prb evaluate --profile-posts`: .*{message}"
        ):
            report(sweep, out=tmp_path / "page.html")

"""The page as a file: its parts, its sizes, its policy, and what hostile names cannot do."""

import base64
import dataclasses
import hashlib
import html
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic import profile

sys.path.insert(0, str(Path(__file__).parents[2] / "profiles"))
from made_jobs import made_ranks  # type: ignore[import-not-found]

from nearpeak.machines.catalogue import find
from nearpeak.profiles.job_analysis import analyze_job
from nearpeak.render.html.document import asset
from nearpeak.render.html.profile import MOST_SPANS, SCRIPTS, data_json, profile_page
from nearpeak.render.views.profile_roofs import ProfileRoofs
from nearpeak.render.views.verdict import sentences

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\n\u202e{}<!--hole:script--><!--"


class Parsed(HTMLParser):
    """The elements of a page, the text of its scripts and styles, and its visible text."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.inner, self.text, self._open = [], {}, [], []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1][0] in ("script", "style"):
            tag, attributes = self._open[-1]
            self.inner.setdefault(attributes.get("id", tag), []).append(data)
        else:
            self.text.append(data)

    def one(self, name):
        return "".join(self.inner[name])

    def all(self, tag):
        return [attributes for found, attributes in self.tags if found == tag]


def data_of(content):
    return json.loads(Parsed(content).one("data"))


def hostile(name):
    """A profile and a machine in which every text is hostile."""
    made = profile(300, name=name)
    ops = tuple(dataclasses.replace(op, phase=name, limiter=name) for op in made.ops[:40]) + made.ops[40:]
    machine = find("h200-sxm")
    limits = dataclasses.replace(machine.achievable, matrix={name: 1e15}, how="measured")
    machine = dataclasses.replace(machine, name=name, id=name, memory_kind=name, achievable=limits)
    return dataclasses.replace(made, ops=ops, date=name), machine


def test_an_empty_report_is_small():
    content = profile_page(profile(0))
    assert len(content.encode()) < 150_000


@pytest.mark.slow
def test_a_report_of_100_000_ops_is_below_5_megabytes():
    assert len(profile_page(profile(100_000)).encode()) < 5_000_000


def test_equal_profiles_give_equal_bytes():
    assert profile_page(profile(200)) == profile_page(profile(200))


def test_the_policy_allows_this_script_and_this_style_alone():
    parsed = Parsed(profile_page(profile(50)))
    (policy,) = [meta["content"] for meta in parsed.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    hashes = {
        name: base64.b64encode(hashlib.sha256(parsed.one(name).encode()).digest()).decode()
        for name in ("script", "style")
    }
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_nothing_is_loaded_from_anywhere():
    parsed = Parsed(profile_page(profile(50)))
    for tag, attributes in parsed.tags:
        assert tag not in ("img", "link", "iframe", "object", "embed")
        assert "src" not in attributes and "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"url\((?!#)|@import", parsed.one("style"))
    assert "https://" not in parsed.one("script")


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_write_no_markup_and_run_no_text(name):
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", asset(name))


def test_the_sentences_are_those_of_the_terminal():
    made = profile(300)
    text = " ".join("".join(Parsed(profile_page(made)).text).split())
    for sentence in sentences(made, made.findings).values():
        assert " ".join(sentence.split()) in text


def test_every_part_of_the_waterfall_is_there():
    content = profile_page(profile(300))
    for name in ("ideal", "traffic", "fusion", "slow kernels", "not modeled", "communication", "idle", "wall"):
        assert re.search(rf'<th scope="row"><span class="term" tabindex="0" title="[^"]+">{name}</span></th>', content)


def test_a_part_below_zero_is_called_wrong():
    made = profile(300)
    parts = tuple(
        dataclasses.replace(part, seconds=-made.wall_s) if part.name == "traffic" else part
        for part in made.waterfall.parts
    )
    content = profile_page(dataclasses.replace(made, waterfall=dataclasses.replace(made.waterfall, parts=parts)))
    assert "below zero: measure this machine again" in content
    assert 'width="-' not in content


def test_findings_have_their_remedy_as_code_and_a_link_to_their_ops():
    content = profile_page(profile(300))
    assert '<pre class="scroll" tabindex="0"><code>x = norm(x)\n    # indented</code></pre>' in content
    assert 'data-finding="0">Show its 30 ops in the table</button>' in content
    assert data_of(content)["findings"][0]["ops"][:4] == [6, 1, 9, 1]


def test_findings_have_the_lines_of_code_that_the_profile_has():
    content = profile_page(profile(300))
    line = "<mark><i>113</i>        x = x.float()</mark>"
    excerpt = f'<pre class="excerpt scroll" tabindex="0"><code><span><i>112</i>    def forward(self, x):</span>{line}'
    assert content.count(excerpt) == 2
    assert data_of(content)["excerpts"]["modeling.py:113"]["lines"][1] == "        x = x.float()"
    assert "<mark>" not in profile_page(dataclasses.replace(profile(300), excerpts=()))


def test_no_file_is_read_for_a_page(tmp_path, monkeypatch):
    (tmp_path / "modeling.py").write_text("secret\n" * 200)
    monkeypatch.chdir(tmp_path)
    assert "secret" not in profile_page(dataclasses.replace(profile(300), excerpts=()))


REMEDY = """\
Keep it on the device, and read it every so many steps:
    total += loss.detach()
    if step % 100 == 0:
        print(total.item())
Or pad batches to a few lengths."""


def test_sentences_of_a_remedy_are_not_code():
    made = profile(300)
    finding = dataclasses.replace(made.findings[0], remedy=REMEDY)
    content = profile_page(made, findings=[finding])
    assert '<p class="said plain">Keep it on the device, and read it every so many steps:</p>' in content
    assert "<code>total += loss.detach()\nif step % 100 == 0:\n    print(total.item())</code>" in content
    assert '<p class="said plain">Or pad batches to a few lengths.</p>' in content


def test_a_remedy_of_one_line_is_code_or_a_sentence():
    made = profile(300)
    for remedy, shown in (
        ("model.eval()  # once", '<p class="said advice">Instead:</p><div class="code">'),
        ("Leave `x.clone()` out.", '<p class="said advice">Instead: Leave <code>x.clone()</code> out.</p>'),
    ):
        assert shown in profile_page(made, findings=[dataclasses.replace(made.findings[0], remedy=remedy)])


def test_idle_time_is_folded_by_cause():
    made = profile(300)
    cause = made.idle[0]
    places = [dataclasses.replace(cause, seconds=cause.seconds / 60, where=f"train.py:{line}") for line in range(30)]
    content = profile_page(dataclasses.replace(made, idle=(*places, made.idle[1])))
    idle = content.partition("<h3>Idle</h3>")[2].partition("</section>")[0]
    assert idle.count('<details class="finding cause">') == 2 and "<details open" not in idle
    assert idle.count("train.py:") == 20 and "10 places" in idle
    assert "90 times" in idle


def test_words_are_explained_where_they_first_stand_and_in_a_list():
    parsed = Parsed(profile_page(profile(300)))
    terms = [attributes for tag, attributes in parsed.tags if attributes.get("class") == "term"]
    assert len(terms) > 10 and all(each["title"] and each["tabindex"] == "0" for each in terms)
    for word in ("waterfall", "as written", "fused", "bound", "expected", "launch wait"):
        assert f"<dt>{word}</dt>" in profile_page(profile(300))


def test_findings_to_show_can_be_chosen():
    made = profile(300)
    content = profile_page(made, findings=made.findings[1:])
    assert "unfused-norm" not in content and "repeated-cast" in content


def test_without_a_timeline_there_is_none_in_the_data():
    assert data_of(profile_page(dataclasses.replace(profile(50), timeline=(), gaps=())))["timeline"] is None


def test_hostile_names_stay_text():
    made, machine = hostile(HOSTILE)
    content = profile_page(made, machine=machine)
    parsed = Parsed(content)
    assert parsed.all("img") == []
    assert [each.get("id") for each in parsed.all("script")] == ["data", None]
    assert parsed.one("script") == Parsed(profile_page(profile(0))).one("script")
    assert "\u202e" not in content
    data = json.loads(parsed.one("data"))
    assert any("</script><img src=x onerror=alert(1)>" in value for value in data["ops"]["name"]["values"])
    assert not re.search(r"[<>&\u2028\u2029]", parsed.one("data"))


def test_names_of_10_000_characters_are_cut():
    made, machine = hostile("x" * 10_000 + "{}")
    content = profile_page(made, machine=machine)
    assert len(content.encode()) < 400_000
    assert "x" * 5000 not in content


def test_times_keep_four_digits():
    made = profile(100)
    data = data_of(profile_page(made))["ops"]
    for op, measured in zip(made.ops, data["measured"], strict=True):
        assert measured * 1e-9 == pytest.approx(op.measured_s, rel=6e-4)


@pytest.mark.slow
def test_a_timeline_of_too_many_kernels_is_thinned_and_keeps_its_length():
    made = profile(3 * MOST_SPANS // 2)
    data = json.loads(data_json(made, (), ProfileRoofs(roofs=(), origin="")))["timeline"]
    spans = len(data["start"]["index"] if isinstance(data["start"], dict) else data["start"])
    merged = data["merged"]
    counts = [merged["values"][at] for at in merged["index"]] if isinstance(merged, dict) else merged
    assert spans < len(made.timeline)
    assert spans <= MOST_SPANS
    assert sum(counts) == len(made.timeline)


def test_a_timeline_begins_with_its_first_gap_or_kernel():
    made = profile(100)
    gap = dataclasses.replace(made.gaps[0], start_s=-1e-3, seconds=1e-3)
    early = data_of(profile_page(dataclasses.replace(made, gaps=(gap, *made.gaps))))["timeline"]
    assert early["gaps"]["start"][0] == 0 and early["start"][0] == 1_000_000
    without = data_of(profile_page(dataclasses.replace(made, gaps=())))["timeline"]
    assert without["start"][0] == 0 and without["gaps"]["cause"] == []


def test_a_job_has_its_ranks_above_the_step_of_rank_0():
    assert "Ranks side by side" not in profile_page(profile(5))
    job = analyze_job(made_ranks(own=lambda rank, step: {"input": 3e-3} if rank == 1 else {}), 3)
    content = profile_page(dataclasses.replace(profile(5), job=job))
    assert content.index("Rank 1 is late in every step") < content.index("Where the time of a step goes")
    assert content.count('aria-label="Where a step of each of 3 ranks goes.') == 1
    assert ".np-f1{fill:light-dark(" in content  # the picture's colors follow the page
    parsed = Parsed(content)
    digest = base64.b64encode(hashlib.sha256(parsed.one("style").encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in html.unescape(content)
    assert not [attributes for _, attributes in parsed.tags if "style" in attributes]


def test_hostile_names_of_a_job_stay_text():
    job = analyze_job(made_ranks(own=lambda rank, step: {"input": 3e-3} if rank == 1 else {}), 3)
    late = dataclasses.replace(job.late[0], where=HOSTILE, evidence=HOSTILE)
    job = dataclasses.replace(job, late=(late,), notes=(HOSTILE,))
    content = profile_page(dataclasses.replace(profile(5), job=job))
    assert "<img" not in content and "alert(1)" in content

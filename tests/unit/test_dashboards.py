"""Dashboards, alert rules and provisioning, as far as files alone can tell."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
INFRA = ROOT / "infra"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "dashboards").glob("*.json"))}
KNOWN_VARIABLES = {"datasource", "__rate_interval"}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def load(path: str) -> Any:
    return yaml.safe_load((INFRA / path).read_text())


def test_there_are_three_dashboards_with_identities_of_their_own() -> None:
    assert set(DASHBOARDS) == {"pipeline", "replicas", "orchestration"}
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == 3
    assert len({dashboard["title"] for dashboard in DASHBOARDS.values()}) == 3
    for dashboard in DASHBOARDS.values():
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_uses_the_chosen_data_source_and_names_its_metrics(name: str) -> None:
    dashboard = DASHBOARDS[name]
    declared = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert declared["datasource"]["type"] == "datasource"
    for panel in panels(dashboard):
        assert panel["targets"], panel["title"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
            assert used <= set(declared) | KNOWN_VARIABLES, target["expr"]
            for metric in re.findall(
                r"\b((?:pa|prefect|process|vllm)[_:][\w:]+|up|ALERTS)\b(?=[\[{ )]|$)", target["expr"]
            ):
                stem = re.sub(r"_(bucket|sum|count)$", "", metric)
                assert stem in panel["description"], f"{panel['title']}: {metric} is not explained"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    (source,) = load("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "$PROMETHEUS_URL")
    for dashboard in DASHBOARDS.values():
        chosen = dashboard["templating"]["list"][0]["current"]["value"]
        assert chosen == source["uid"]
    (provider,) = load("grafana/provisioning/dashboards/default.yml")["providers"]
    assert provider["type"] == "file"


def test_every_alert_says_how_grave_it_is_and_what_to_do() -> None:
    rules = [rule for group in load("prometheus/rules.yml")["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    tested = {
        case["alertname"]
        for test in load("prometheus/rules_test.yml")["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert tested == {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


@pytest.mark.parametrize(
    "command",
    [("check", "config", "prometheus.yml"), ("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")],
)
def test_promtool_accepts_configuration_and_rules_and_their_tests_pass(command: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian: apt-get install prometheus)")
    *verb, file = command
    done = subprocess.run(
        [promtool, *verb, str(INFRA / "prometheus" / file)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

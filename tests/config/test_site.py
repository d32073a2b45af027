"""The site's own configuration: all errors at once, no silent fallback in production."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightframe.config.job import parse_job
from tightframe.config.site import SiteEntry, open_data, parse_site_file, server_entry, site_entry
from tightframe.errors import SiteConfigError


def _write(folder: Path, values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tightframe.json").write_text(json.dumps(values))
    return folder


def test_without_a_file_the_simulator_has_a_twin_and_production_refuses(
    tmp_path: Path, small: dict[str, Any]
) -> None:
    assert site_entry(tmp_path, "site-1", production=False) is None
    assert open_data(parse_job(small), "site-1", None).synthetic
    with pytest.raises(SiteConfigError, match=r"TF-201.*tightframe\.json"):
        site_entry(tmp_path, "site-1", production=True)


def test_one_file_maps_all_sites(tmp_path: Path) -> None:
    folder = _write(
        tmp_path,
        {
            "sites": {
                "site-1": {"data": {"fed_isic2019": {"root": "/x", "center": 3}}, "device": "cpu"},
                "site-2": {"data": {"fed_isic2019": {"root": "/x", "center": 5}}, "offer_prototypes": False},
            },
            "server": {"initial_model": "/x/start.safetensors"},
        },
    )
    first = site_entry(folder, "site-1", production=False)
    second = site_entry(folder, "site-2", production=False)
    assert first is not None and second is not None
    assert first.data["fed_isic2019"]["center"] == 3
    assert first.offer_prototypes and not second.offer_prototypes
    assert server_entry(folder).initial_model == "/x/start.safetensors"
    with pytest.raises(SiteConfigError, match="site-3"):
        site_entry(folder, "site-3", production=False)


def test_all_problems_are_listed() -> None:
    values = {
        "sites": {
            "site-1": {"data": {"fed_isic2019": {"root": "/x", "center": 9}}, "devise": "cpu"},
            "site-2": {"loader_workers": -1, "data": {"cifar": {}}},
        },
        "servers": {},
    }
    with pytest.raises(SiteConfigError) as caught:
        parse_site_file(values)
    for part in ("devise", "loader_workers", "servers", "sites.site-1.data.fed_isic2019.center", "cifar"):
        assert part in str(caught.value)


def test_production_needs_a_state_dir(tmp_path: Path) -> None:
    folder = _write(tmp_path, {"data": {"fed_isic2019": {"root": "/x", "center": 0}}})
    with pytest.raises(SiteConfigError, match="state_dir"):
        site_entry(folder, "site-1", production=True)


def test_broken_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tightframe.json").write_text("{")
    with pytest.raises(SiteConfigError, match="TF-202"):
        site_entry(tmp_path, "site-1", production=False)


def test_no_rule_is_lost_to_a_second_block_of_the_same_name(tmp_path: Path) -> None:
    """Readers of JSON take the last: a block pasted below made a strict site a standard one, silently."""
    text = '{"state_dir": "/x", "policy": {"profile": "strict"}, "policy": {"max_weight_share": 0.5}}'
    (tmp_path / "tightframe.json").write_text(text)
    with pytest.raises(SiteConfigError, match=r"TF-202: .*the key 'policy' stands twice"):
        site_entry(tmp_path, "site-1", production=True)


def test_a_configured_site_never_falls_back_to_the_twin(tmp_path: Path, small: dict[str, Any]) -> None:
    folder = _write(tmp_path, {"sites": {"site-1": {"device": "cpu"}}})
    entry = site_entry(folder, "site-1", production=False)
    with pytest.raises(SiteConfigError, match="TF-201"):
        open_data(parse_job(small), "site-1", entry)


def test_an_entry_made_in_python_is_checked_like_a_files(small: dict[str, Any]) -> None:
    entry = SiteEntry(data={"fed_isic2019": {"root": "/data/fed_isic2019"}})
    with pytest.raises(
        SiteConfigError, match=r"TF-202.*the entry of site-1.*(?s:.)*data\.fed_isic2019\.center"
    ):
        open_data(parse_job(small), "site-1", entry)


def test_a_policy_alone_is_rehearsed_on_the_twin_and_refused_in_production(
    tmp_path: Path, small: dict[str, Any]
) -> None:
    job, policy = parse_job(small), {"profile": "strict", "epsilon_cap": 2.0}
    folder = _write(tmp_path, {"sites": {"site-1": {"policy": policy, "device": "cpu"}}})
    entry = site_entry(folder, "site-1", production=False)
    assert entry is not None and entry.policy.resolve(production=False).epsilon_cap == 2.0
    assert open_data(job, "site-1", entry).synthetic
    alone = _write(tmp_path / "alone", {"policy": policy})
    found = site_entry(alone, "site-1", production=False, alone=True)
    assert found is not None and open_data(job, "site-1", found).synthetic
    with pytest.raises(SiteConfigError, match=r"TF-201.*`state_dir` in .*alone/tightframe\.json"):
        site_entry(alone, "site-1", production=True)
    # Whoever says anything of records means records, and never gets generated ones.
    lasting: dict[str, Any] = {"state_dir": "/var/lib/tightframe"}
    for of_records in (lasting, {"dataset_id": "skin"}, {"data": {}}, {"accepted_options": {}}):
        meant = _write(tmp_path / "meant", {"policy": policy, **of_records})
        entry = site_entry(meant, "site-1", production=of_records is lasting, alone=True)
        with pytest.raises(SiteConfigError, match=r"TF-201.*no data set.*tightframe\.json"):
            open_data(job, "site-1", entry)


def test_two_sites_never_have_the_same_records() -> None:
    same = {"data": {"fed_isic2019": {"root": "/x", "center": 3}}}
    with pytest.raises(SiteConfigError, match="the same records as site-1"):
        parse_site_file({"sites": {"site-1": same, "site-2": same}})
    other = {"data": {"fed_isic2019": {"root": "/x", "center": 2}}}
    assert len(parse_site_file({"sites": {"site-1": same, "site-2": other}}).sites) == 2


def test_the_file_of_one_site_serves_no_simulation_of_several(tmp_path: Path) -> None:
    folder = _write(tmp_path, {"data": {"fed_isic2019": {"root": "/x", "center": 0}}})
    with pytest.raises(SiteConfigError, match="configures one site, but this simulation has several"):
        site_entry(folder, "site-1", production=False)
    assert site_entry(folder, "site-1", production=False, alone=True) is not None


@pytest.mark.parametrize("path", ["", "relative/folder", "./here"])
def test_paths_are_absolute(path: str, tmp_path: Path) -> None:
    folder = _write(
        tmp_path,
        {
            "state_dir": path,
            "data": {"fed_isic2019": {"root": path, "center": 0}},
            "server": {"initial_model": path},
        },
    )
    with pytest.raises(SiteConfigError) as caught:
        site_entry(folder, "site-1", production=True)
    for key in ("state_dir", "data.fed_isic2019.root", "server.initial_model"):
        assert f"{key}: " in str(caught.value)


def test_a_file_lent_for_a_run_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    folder = _write(tmp_path, {"sites": {"site-1": {"data": {"fed_isic2019": {"root": "/x", "center": 3}}}}})
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for lender, forgotten in ((ended.pid, True), (os.getpid(), False)):
        (folder / "tightframe.json.lent").write_text(f"hash\n/ham.json\n{lender}\n")
        if forgotten:
            with pytest.raises(SiteConfigError, match="was interrupted"):
                site_entry(folder, "site-1", production=False)
        else:
            assert site_entry(folder, "site-1", production=False) is not None

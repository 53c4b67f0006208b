from launcher.metrics.docs import PAGE, generate


def test_the_committed_page_of_metrics_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == generate(), "run: python -m launcher.metrics.docs --write"

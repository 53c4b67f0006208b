from launcher.config.docs import PAGE, generate
from launcher.config.loading import dotted_keys, nested_class
from launcher.config.schema import EvalConfig, ExportConfig, RunConfig, SftConfig


def test_the_committed_configuration_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == generate(), "run: python -m launcher.config.docs --write"


def test_every_field_of_every_class_is_documented() -> None:
    kinds = [RunConfig, SftConfig, EvalConfig, ExportConfig]
    for kind in kinds:
        assert kind.__doc__
        for name, field in kind.model_fields.items():
            assert field.description, f"{kind.__name__}.{name}"
            inner = nested_class(field.annotation)
            if inner is not None and inner not in kinds:
                kinds.append(inner)  # type: ignore[arg-type]


def test_every_overridable_key_is_on_the_page() -> None:
    page = generate()
    assert [key for key in dotted_keys(RunConfig) if f"`{key}`" not in page] == []

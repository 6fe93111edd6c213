"""Chat templates in Ollama's language: the same text, or none."""

from typing import Any

import pytest

from app.contract.data_formats import parse_row
from tests.harness.tokenizers import made
from workers.exports.modelfile import affixes_of, write
from workers.exports.verify import Sample

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>"
    "\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_2 = (
    "{% for message in messages %}{% if message.role == 'user' %}<s>[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }} </s>{% endif %}{% endfor %}"
)
WITH_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
)
UPPER = CHATML.replace("message.content }}", "message.content | upper }}")
COUNTING = CHATML.replace("{{ message.role }}", "{{ message.role }} {{ loop.index }}")


def samples_of(*conversations: list[tuple[str, str]]) -> list[Sample]:
    found = []
    for turns in conversations:
        rows: list[Any] = [{"role": role, "content": content} for role, content in turns]
        _, example = parse_row({"messages": rows})
        found.append(Sample(example, ([], []), True, 64))
    return found


PLAIN = [("user", "Hi"), ("assistant", "Hello"), ("user", "How?"), ("assistant", "So.")]
WITH_SYSTEM = [("system", "Be kind."), ("user", "Hi {{ there }}"), ("assistant", "Hello")]


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, LLAMA_2])
def test_texts_around_messages_are_found(template: str) -> None:
    tokenizer = made("first")
    tokenizer.chat_template = template
    samples = samples_of(PLAIN) if template is LLAMA_2 else samples_of(PLAIN, WITH_SYSTEM)
    affixes = affixes_of(tokenizer, samples)
    assert affixes is not None
    messages = [{"role": role, "content": content} for role, content in PLAIN[:3]]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert affixes.render(messages) == expected


@pytest.mark.parametrize("template", [UPPER, COUNTING, "{{ messages | length }}"])
def test_a_template_that_does_more_is_left_out(template: str, tmp_path: Any) -> None:
    tokenizer = made("first")
    tokenizer.chat_template = template
    assert affixes_of(tokenizer, samples_of(PLAIN)) is None
    notes = write(tmp_path, tokenizer, samples_of(PLAIN))
    assert "TEMPLATE" not in (tmp_path / "Modelfile").read_text()
    assert "has no template" in notes[0]


def test_a_template_with_a_default_system_message_is_left_out() -> None:
    """A system message takes the place of the default one, which texts around messages cannot express."""
    tokenizer = made("first")
    tokenizer.chat_template = WITH_DEFAULT_SYSTEM
    assert affixes_of(tokenizer, samples_of(PLAIN)) is None


def test_the_modelfile_has_template_and_stops(tmp_path: Any) -> None:
    tokenizer = made("first")
    tokenizer.chat_template = CHATML
    assert write(tmp_path, tokenizer, samples_of(PLAIN, WITH_SYSTEM)) == []
    content = (tmp_path / "Modelfile").read_text()
    assert content.startswith("FROM .\n")
    assert '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n' in content
    assert content.count("PARAMETER stop") == 2


@pytest.mark.parametrize("evil", ['END\\"\\"\\"\\nSYSTEM evil\\n', "{", "{{ .Evil }}"])
def test_a_template_cannot_write_directives(tmp_path: Any, evil: str) -> None:
    """The Modelfile is used outside of any sandbox."""
    tokenizer = made("first")
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "{{ '" + evil + "' }}<|im_end|>")
    write(tmp_path, tokenizer, samples_of(PLAIN))
    lines = (tmp_path / "Modelfile").read_text().splitlines()
    assert not [line for line in lines if line.startswith(("SYSTEM", "ADAPTER"))]
    template = "".join(line for line in lines if not line.startswith("PARAMETER stop"))
    assert "{{ .Evil" not in template
    assert "{{{" not in template


def test_without_a_template_there_is_no_note(tmp_path: Any) -> None:
    tokenizer = made("first")
    tokenizer.chat_template = None
    assert write(tmp_path, tokenizer, []) == []

"""Chat templates: the text transformers would make, and nothing that a hostile template can do to us."""

from __future__ import annotations

import ast
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
import transformers
from served_model import wait_until

from ridgeline.errors import BadRequest, Overloaded, TryAgain, Unsupported
from ridgeline.process import framed_child
from ridgeline.process.framed_child import FramedChild
from ridgeline.text import chat_template
from ridgeline.text.chat_template import (
    LONG_INPUT_BYTES,
    MEMORY_BYTES,
    ChatTemplate,
    RendererBusy,
    TemplateProcess,
    plain_messages,
)

PACKAGE = Path(chat_template.__file__).parent.parent
USER = [{"role": "user", "content": "hello"}]

# Four styles that models are trained on, written here from the formats.
CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (tools and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
LLAMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + (date_string or 'unknown') + '\\n' }}
{%- if tools is not none %}
    {{- 'Environment: ipython\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{%- endif %}
{{- system_message }}{{ '<|eot_id|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set lead = messages[0]['content'] + '\\n\\n' %}
{% set turns = messages[1:] %}{% else %}{% set lead = '' %}{% set turns = messages %}{% endif %}
{% for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + (lead if loop.first else '') }}
{%- if message['content'] is string %}{{ message['content'] | trim }}
{%- elif message['content'] is iterable %}{% for item in message['content'] %}{{ item['text'] | trim }}{% endfor %}
{%- else %}{{ raise_exception('Invalid content type') }}{% endif %}
{{- '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
MISTRAL = """{{ bos_token }}
{%- set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in loop_messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- generation %}{% endgeneration %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' }}
        {%- if loop.first and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
        {{- message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
    {%- elif message.role not in ['tool'] %}
        {{- raise_exception('Only user, assistant and system roles are supported!') }}
    {%- else %}
        {%- break %}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": USER,
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Grüße, 你好 <b>&'\"\\n"}],
    "turns": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "one\n two "},
        {"role": "assistant", "content": " three"},
        {"role": "user", "content": ""},
    ],
    "calls": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "",
         "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}]},
        {"role": "tool", "content": "{\"t\": 21}"},
    ],
    "wrong order": [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}],
}
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "Tells the <weather> & \"more\" é",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}}]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate({"default": source}, SPECIAL_TOKENS).render(messages, **options)


# --- the same text as transformers ---


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedTokenizerFast:
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **SPECIAL_TOKENS)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("style", TEMPLATES)
def test_same_text_as_transformers(
    style: str, conversation: str, tools: Any, oracle: transformers.PreTrainedTokenizerFast
) -> None:
    source, messages = TEMPLATES[style], CONVERSATIONS[conversation]
    for prompt in (True, False):
        for variables in ({}, {"enable_thinking": False, "date_string": "26 Jul 2024"}):
            try:
                expected = oracle.apply_chat_template(
                    messages, tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False, **variables
                )
            except Exception as error:
                with pytest.raises(BadRequest) as refusal:
                    rendered(source, messages, tools=tools, add_generation_prompt=prompt, variables=variables)
                assert str(error) in str(refusal.value) and "\n" not in str(refusal.value)
            else:
                got = rendered(source, messages, tools=tools, add_generation_prompt=prompt, variables=variables)
                assert got == expected


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("final", ["to be", "to be  ", " padded \n"])
def test_final_message_goes_on_as_in_transformers(
    style: str, final: str, oracle: transformers.PreTrainedTokenizerFast
) -> None:
    messages = [*USER, {"role": "assistant", "content": final}]
    expected = oracle.apply_chat_template(
        messages, chat_template=TEMPLATES[style], continue_final_message=True, tokenize=False
    )
    got = rendered(TEMPLATES[style], messages, add_generation_prompt=False, continue_final_message=True)
    assert got == expected and got.rstrip().endswith(final.strip())


def test_helpers_of_the_dialect(oracle: transformers.PreTrainedTokenizerFast) -> None:
    """tojson's options, strftime_now, loop controls, namespaces, dict, trimming of blocks."""
    source = """
    {% set ns = namespace(found=false, n=dict(a=1)) %}
  {% for i in range(9) %}
    {% if i == 2 %}{% continue %}{% endif %}
    {% if i == 4 %}{% set ns.found = true %}{% break %}{% endif %}
    {{ i }}
  {% endfor %}
{{ ns.found }} {{ ns.n | items | list }} {{ strftime_now('%Y') | length }}
{{ [1, 'é<&>', None, {'b': 1, 'a': 2}] | tojson }} {{ {'b': 1, 'a': [1]} | tojson(indent=2, sort_keys=true) }}
{{ 'x' | tojson(ensure_ascii=true) }} {{ [1] | tojson(separators=(',', ':')) }} {{ undefined_name }}|"""
    assert rendered(source) == oracle.apply_chat_template(USER, chat_template=source, tokenize=False)


# A template that takes parts, and one that knows calls by a content of null and joins their arguments as text.
PARTS = """{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"""
NULL_CONTENT = """{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}{{ '<call>' +
   tool['function']['name'] + ' ' + tool['function']['arguments'] }}{% endfor %}
{%- else %}{{ '<' + message['role'] + '>' + message['content'] }}{% endif %}{% endfor %}"""


def test_parts_are_joined_as_the_template_joins_them(oracle: transformers.PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    several = [{"role": "system", "content": parts}, {"role": "user", "content": parts}, {"role": "user", "content": parts[:1]}]
    plain = [{"role": "system", "content": "One.\nTwo."}, {"role": "user", "content": parts}, {"role": "user", "content": "One."}]
    expected = oracle.apply_chat_template(plain, chat_template=PARTS, tokenize=False)
    assert rendered(PARTS, several) == expected == "<system>One.\nTwo.<user>One.Two.<user>One."
    for source in ("{{ messages[0].content + '!' }}", "{{ messages[0].content }}!", "{{ messages[0].content | tojson }}!"):
        assert rendered(source, several[1:2]).strip('"!').replace("\\n", "\n") == "One.\nTwo."
    assert rendered(PARTS, several[1:2], add_generation_prompt=False, continue_final_message=True) == "<user>One.\nTwo."


# Takes parts, but joins the first message as a text where the tools come before it, as Llama's templates for images do.
TOOLS_FIRST = """{% if tools and tools_in_user_message | default(true) %}
{%- set first, messages = messages[0].content | trim, messages[1:] %}<tools>{{ first }}{% endif %}""" + PARTS
ONLY_LAST = """{% for message in messages %}<{{ message.role }}>{% if loop.last and message.content is not string %}
{%- for part in message.content %}{{ part.text }}{% endfor %}{% else %}{{ "" + message.content }}{% endif %}{% endfor %}"""


def test_parts_are_given_only_where_this_conversation_shows_them() -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    several, plain = {"role": "user", "content": parts}, {"role": "user", "content": "Hi."}
    template = ChatTemplate({"default": TOOLS_FIRST}, SPECIAL_TOKENS)
    for _ in range(2):               # what one conversation shows is not taken for another
        assert template.render([several, plain]) == "<user>One.Two.<user>Hi."
        assert template.render([plain, several], tools=TOOLS) == "<tools>Hi.<user>One.Two."
        assert template.render([several, plain], tools=TOOLS) == "<tools>One.\nTwo.<user>Hi."
        assert template.render([several, several], tools=TOOLS) == "<tools>One.\nTwo.<user>One.\nTwo."
        free = {"tools_in_user_message": False}
        assert template.render([several, plain], tools=TOOLS, variables=free) == "<user>One.Two.<user>Hi."
    template = ChatTemplate({"default": ONLY_LAST}, SPECIAL_TOKENS)
    for _ in range(2):
        assert template.render([plain, several]) == "<user>Hi.<user>One.Two."
        assert template.render([several, plain]) == "<user>One.\nTwo.<user>Hi."


def test_many_messages_of_several_parts_are_told_apart() -> None:
    messages = [{"role": "user", "content": [f"{place}.", "x."]} for place in range(12)]
    assert rendered(PARTS, messages) == "".join(f"<user>{place}.x." for place in range(12))
    no_second = PARTS.replace("part in message.content", "part in message.content[: 1 if loop.index0 == 1 else 2]")
    joined = "".join(f"<user>{place}.\nx." for place in range(12))
    assert rendered(no_second, messages) == joined


def test_calls_reach_a_template_that_knows_them_by_a_content_of_null(oracle: transformers.PreTrainedTokenizerFast) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    called = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "21"}]
    expected = oracle.apply_chat_template(called, chat_template=NULL_CONTENT, tokenize=False)
    assert rendered(NULL_CONTENT, called) == expected and '<call>weather {"city": "Zürich"}<tool>21' in expected
    without = [*called[:1], {**called[1], "content": ""}, *called[2:]]
    assert rendered(NULL_CONTENT, without) == expected
    said = [*called[:1], {**called[1], "content": "Hm."}]
    assert rendered(NULL_CONTENT, said).endswith("<assistant>Hm.")


# --- messages ---


def test_messages_take_the_form_templates_expect() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "why"},
        {"role": "assistant", "tool_calls": None},
    ]
    plain = plain_messages(given)
    assert plain[0] == {"role": "user", "content": "a\nb"}
    hints = {"cache_control": {"type": "ephemeral"}, "annotations": [], "id": "1", "index": 0, "image_url": None}
    parts = [{"type": "input_text", "text": "a"} | hints, {"text": "b"}, "c"]     # as clients send back what they got
    assert plain_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb\nc"
    assert plain[1]["content"] == "" and plain[1]["reasoning_content"] == plain[1]["thinking"] == "why"
    assert plain[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert plain[2] == {"role": "assistant", "content": ""}
    assert given[1]["content"] is None and given[1]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages must be a list with at least one message"),
        ("hello", "messages must be a list"),
        (["hello"], "messages[0] must be an object with a role"),
        ([*USER, {"content": "x"}], "messages[1] must be an object with a role"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0] is of type 'image_url'"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "arguments is not valid JSON"),
        ([{"role": "assistant", "tool_calls": "f()"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["f()"]}], "tool_calls[0] must be an object with a function"),
        ([{"role": "user", "content": "x", "extra": object()}], "must be plain JSON data"),
        ([{"role": "user"}], "messages[0].content is missing; a message of role user needs it"),
        ([{"role": "system", "content": None}, *USER], "messages[0].content is missing; a message of role system needs it"),
        ([{"role": "user", "content": [{"type": "image_url", "text": "x", "image_url": {}}]}], "is of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a text"),
        ([{"role": "user", "content": [{"type": "zzz", "text": "x"}]}], "messages[0].content[0] is of type 'zzz'"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], "messages[0].content[0] is of type"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "image_url": "y"}]}],
         "messages[0].content[0].image_url is not supported"),
    ],
)
def test_bad_messages_are_refused_in_one_line(messages: Any, said: str) -> None:
    with pytest.raises((BadRequest, Unsupported)) as refusal:
        rendered(CHATML, messages)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_too_long_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_INPUT_BYTES", 1000)
    with pytest.raises(BadRequest, match=r"the messages take 2,.* bytes as JSON; 1,000 are allowed"):
        rendered("", [{"role": "user", "content": "x" * 2000}])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "tokenize", "bos_token", "raise_exception"])
def test_reserved_variables_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=f"'{name}' is reserved"):
        rendered("x", variables={name: "y"})


def test_no_template_says_what_to_do() -> None:
    with pytest.raises(BadRequest, match="no chat template: start with --chat-template FILE"):
        ChatTemplate({}, {}).render(USER)


def test_continuing_and_beginning_exclude_each_other() -> None:
    with pytest.raises(BadRequest, match="add_generation_prompt=false"):
        rendered(CHATML, continue_final_message=True)


def test_template_that_drops_the_final_message() -> None:
    with pytest.raises(BadRequest, match="leaves out the final message"):
        rendered("nothing", add_generation_prompt=False, continue_final_message=True)


def test_tool_template_is_taken_when_there_are_tools() -> None:
    template = ChatTemplate({"default": "D", "tool_use": "T{{ tools | length }}"}, {})
    assert (template.render(USER), template.render(USER, tools=TOOLS), template.render(USER, tools=[])) == ("D", "T1", "D")


# --- hostile templates ---

# Each tries to reach Python; the sandbox must raise, or give nothing that is worth having.
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla' ~ 'ss__')|attr('__base__') }}",
    "{{ 'x'|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.popen('touch OWNED').read() }}",
    "{{ cycler.__init__.__globals__['os'].system('touch OWNED') }}",
    "{{ lipsum.__globals__['os'].popen('touch OWNED').read() }}",
    "{{ lipsum|attr('__globals__') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ dict.fromkeys.__func__.__globals__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__class__='x') }}",
    "{{ namespace({'_private': 1}) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{0.__class__}'|format('') }}{{ '{a.__init__.__globals__}'.format_map({'a': cycler}) }}",
    "{{ messages.append('x') }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].__setitem__('role', 'x') }}",
    "{{ (1).__class__.__base__ }}",
    "{{ ().__class__ }}{{ [].__class__ }}{{ {}.__class__ }}",
    "{{ [messages]|map(attribute='__class__')|list }}",
    "{{ (messages|groupby('__class__'))[0] }}",
    "{{ [cycler]|map('attr', '__init__')|map('attr', '__globals__')|list }}",
    "{% for x in (messages|map('upper')).gi_frame.f_back.f_globals %}{{ x }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch OWNED') }}",
    "{% extends 'x' %}",
    "{{ config }}{{ request.application.__globals__ }}{{ get_flashed_messages.__globals__ }}",
    "{{ import('os').system('touch OWNED') }}",
    "{{ __import__('os').system('touch OWNED') }}",
    "{{ open('OWNED', 'w') }}{{ eval('1') }}{{ exec('1') }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}{{ m._func.__globals__ }}",
    "{% for i in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ x.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
    "{{ caller.__globals__ }}{{ varargs.__class__ }}{{ context.environment }}",
    "{{ tojson.__globals__ }}{{ ([1]|tojson).__class__ }}",
]


@pytest.fixture(scope="module")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the process of the escape tests lives: whatever it could write would be found there."""
    folder, before = tmp_path_factory.mktemp("cage"), Path.cwd()
    process, usual = TemplateProcess(), chat_template._process
    os.chdir(folder)
    try:
        assert process.render("started here", {}) == "started here"
    finally:
        os.chdir(before)
    chat_template._process = process
    yield folder
    chat_template._process = usual
    process.close()


@pytest.mark.reliability("S-08")
@pytest.mark.parametrize("payload", ESCAPES)
def test_no_way_to_python(payload: str, empty_folder: Path) -> None:
    try:
        text = rendered(payload)
    except BadRequest as refusal:
        assert re.fullmatch("the chat template (tried something unsafe|failed|is not valid).*", str(refusal))
        assert "root:" not in str(refusal) and "0x" not in str(refusal)
    else:
        assert not re.search("class|module|root:|builtins|object|function|0x", text), text
    assert list(empty_folder.iterdir()) == []


LOOP_80 = "{% for i in range(80) %}"
BOMBS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}0123456789{% endfor %}{% endfor %}",
    "multiplied": "{{ 'a' * 10**9 }}",
    "multiplied list": "{{ ([0] * 10**9) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "centre": "{{ 'a' | center(10**9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "doubled": "{% set ns = namespace(x='a') %}" + LOOP_80 + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "replaced": "{% set ns = namespace(x='aa') %}" + LOOP_80 + "{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
    "nested": "{% set ns = namespace(x=[1]) %}" + LOOP_80 + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested json": "{% set ns = namespace(x=[1]) %}" + LOOP_80 + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "compared": "{% set ns = namespace(x=[1], y=[1]) %}" + LOOP_80
    + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "filler": "{{ lipsum(n=10**6) }}",
    "indent": "{{ [[[[1]]]] | tojson(indent=10**8) }}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long source": "{{ 'x' }}" * 60_000,
}


@pytest.fixture(scope="module")
def short_fuse() -> Iterator[TemplateProcess]:
    """A fifth of a second, so that the suite does not wait the full time for every bomb."""
    process = TemplateProcess(seconds=0.2)
    yield process
    process.close()


@pytest.mark.reliability("S-08")
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_soon_and_small(
    name: str, short_fuse: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By limits of CPU time and memory of its process; the default one is a quarter of a second above a second."""
    assert TemplateProcess().seconds == 1.25
    monkeypatch.setattr(chat_template, "_process", short_fuse)
    monkeypatch.setattr(chat_template, "_WAIT_SECONDS", 60.0)            # on a busy machine
    rendered("warm")
    assert short_fuse._child is not None
    child = short_fuse._child.process
    peak, ours = Watcher(child.pid), psutil.Process().memory_info().rss
    with pytest.raises(BadRequest) as refusal:
        rendered(BOMBS[name])
    assert peak.growth() < MEMORY_BYTES and psutil.Process().memory_info().rss - ours < 32 << 20
    assert str(refusal.value).startswith("the chat template ") and "\n" not in str(refusal.value)
    assert rendered("{{ messages[0].content }}") == "hello"      # the next one is served as if nothing had been


@pytest.mark.slow                                        # it measures CPU time
@pytest.mark.reliability("S-08")
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_take_little_cpu_time(name: str, short_fuse: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_process", short_fuse)
    rendered("warm")
    assert short_fuse._child is not None
    used = cpu_meter(short_fuse._child.process)
    with pytest.raises(BadRequest):
        rendered(BOMBS[name])
    assert used() < 1


def cpu_meter(child: subprocess.Popen[bytes]) -> Callable[[], float]:
    """CPU seconds that a child process has used since now; also when it has ended and was waited for."""

    def alive() -> float:
        return sum(psutil.Process(child.pid).cpu_times()[:2])

    def ended() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before, before_ended = alive(), ended()
    return lambda: (ended() - before_ended if child.poll() is not None else alive()) - before


class Watcher:
    """How much a process grows, watched from a thread until it is asked."""

    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)
        self.first = self.most = self.process.memory_info().rss
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while not self.stop.wait(0.005):
            try:
                self.most = max(self.most, self.process.memory_info().rss)
            except psutil.NoSuchProcess:
                return

    def growth(self) -> int:
        self.stop.set()
        self.thread.join()
        return self.most - self.first


@pytest.mark.slow                                        # it measures CPU time
@pytest.mark.reliability("S-08")
def test_the_default_limit_is_within_two_seconds() -> None:
    """Of CPU time: on a busy machine it takes longer, but no more work."""
    rendered("warm")
    assert chat_template._process._child is not None
    child = chat_template._process._child.process
    used = cpu_meter(child)
    with pytest.raises(BadRequest, match=r"took more than 1\.25 s of CPU time and was stopped"):
        rendered(BOMBS["loops"])
    assert 1 < used() < 2


def test_a_template_that_gets_no_cpu_is_waited_for() -> None:
    """Its process stands still for longer than the limit, as on a busy machine: only CPU time counts."""
    process = TemplateProcess(seconds=1.0)
    process.render("warm", {})
    child = process._child
    assert child is not None
    timers = [
        threading.Timer(seconds, os.kill, (child.process.pid, number))
        for seconds, number in ((0.05, signal.SIGSTOP), (1.25, signal.SIGCONT))
    ]
    for timer in timers:
        timer.start()
    loop = "{% for i in range(200) %}{% for j in range(1000) %}{% set x = i + j %}{% endfor %}{% endfor %}done"
    assert process.render(loop, {}) == "done" and process._child is child
    for timer in timers:
        timer.join()                     # a signal to a process that is gone would be an error in another test
    process.close()


def test_a_syntax_error_names_the_line() -> None:
    with pytest.raises(BadRequest, match=r"the chat template is not valid \(line 2\): "):
        rendered("x\n{% if %}")


def test_raise_exception_is_passed_on_in_one_line() -> None:
    with pytest.raises(BadRequest, match=r"^the chat template refused the messages: no such role$"):
        rendered("{{ raise_exception('no such\n role') }}")


# --- the process ---


def test_it_sees_no_secrets_and_leaves_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from ridgeline.text import chat_template as c\n"
        "c.ChatTemplate({'default': 'x'}, {}).render([{'role': 'user', 'content': ''}])\n"
        "print(c._process._child.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "API_KEY": "secret", "PYTHONPATH": str(PACKAGE.parent)}
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, cwd=tmp_path, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    try:
        assert "API_KEY" not in psutil.Process(pid).environ()
    except psutil.NoSuchProcess:
        pass                             # its owner is gone, and it was quicker than we were
    owner.wait()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_environment_of_the_process() -> None:
    process = TemplateProcess()
    os.environ["RIDGELINE_TEST_SECRET"] = "secret"
    try:
        assert process.render("x", {}) == "x"
        assert process._child is not None
        assert "RIDGELINE_TEST_SECRET" not in psutil.Process(process._child.process.pid).environ()
    finally:
        del os.environ["RIDGELINE_TEST_SECRET"]
        process.close()


def test_threads_share_one_process() -> None:
    process = TemplateProcess()
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            answers[number] = process.render("{{ n }}", {"n": number})
            assert answers[number] == str(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.close()
    assert answers == {number: str(number) for number in range(8)}


def test_any_text_survives_the_way_there_and_back() -> None:
    text = "\x00\x01\n\r\u2028\u0085\ud800 é你🙂\\\"'</script>"
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_a_long_prompt_is_rendered() -> None:
    text = "word " * 600_000
    assert rendered(CHATML, [{"role": "user", "content": text}]).count("word") == 600_000


def test_no_other_file_makes_an_environment() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file != Path(chat_template.__file__) and "jinja2" in (text := file.read_text()):
            for node in ast.walk(ast.parse(text)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.split(".")[0] == "jinja2" for name in names), file
    source = ast.parse(Path(chat_template.__file__).read_text())
    calls = [node.func.id for node in ast.walk(source) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert [name for name in calls if name.endswith("Environment")] == ["ImmutableSandboxedEnvironment"]


# --- a process that stops or dies ---


@pytest.fixture
def renderer() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    process.render("warm", {})
    yield process
    process.close()


def pid_of(process: TemplateProcess) -> int:
    assert process._child is not None
    return process._child.process.pid


@pytest.mark.reliability("R-13")
@pytest.mark.parametrize("size", [1, 300_000])
def test_a_renderer_that_stands_still_is_replaced(
    renderer: TemplateProcess, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_WAIT_SECONDS", 0.3)
    os.kill(pid_of(renderer), signal.SIGSTOP)
    with pytest.raises(TryAgain, match="try again later"):
        renderer.render("{{ x }}", {"x": "a" * size})
    monkeypatch.undo()
    assert renderer.render("{{ x }}", {"x": "a" * size}) == "a" * size


@pytest.mark.reliability("R-13")
@pytest.mark.parametrize("size", [1, 300_000])
def test_another_renderer_answers_for_one_that_was_stopped(
    renderer: TemplateProcess, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(chat_template, "_WAIT_SECONDS", 60.0)
    old = pid_of(renderer)
    os.kill(old, signal.SIGSTOP)
    assert renderer.render("{{ x }}", {"x": "a" * size}) == "a" * size
    assert pid_of(renderer) != old


@pytest.mark.reliability("R-13")
def test_renderers_that_are_all_stopped_are_not_the_clients_fault(
    renderer: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(chat_template, "_WAIT_SECONDS", 60.0)
    ask = FramedChild.ask

    def stopped(child: FramedChild, *given: Any, **options: Any) -> bytes:
        child.process.send_signal(signal.SIGSTOP)
        return ask(child, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FramedChild, "ask", stopped)
        with pytest.raises(TryAgain, match="was stopped by a signal; try again later"):
            renderer.render("x", {})
    assert renderer.render("x", {}) == "x"


@pytest.mark.reliability("R-13")
def test_a_caller_that_may_not_wait_does_not(renderer: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    request = chat_template._request("{{ x }}", {"x": 1}, 1.0)
    with monkeypatch.context() as patch:                 # it takes a moment, however long that is on a busy machine
        patch.setattr(chat_template, "_MOMENT", 60.0)
        assert renderer.answer(request, may_wait=False) == "1"
    os.kill(pid_of(renderer), signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(RendererBusy):
            renderer.answer(request, may_wait=False)
    os.kill(pid_of(renderer), signal.SIGCONT)
    assert renderer.answer(chat_template._request("other", {}, 1.0)) == "other"
    with renderer._lock, pytest.raises(RendererBusy):    # another thread renders
        renderer.answer(request, may_wait=False)
    renderer.close()
    with pytest.raises(RendererBusy):                    # it would have to be started
        renderer.answer(request, may_wait=False)


@pytest.mark.reliability("R-13")
def test_many_callers_of_a_stopped_renderer_do_not_add_up(
    renderer: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_WAIT_SECONDS", 0.2)
    with renderer._lock, pytest.raises(Overloaded):
        renderer.render("x", {})


@pytest.mark.reliability("R-13")
def test_a_renderer_that_was_killed_is_not_the_clients_fault(renderer: TemplateProcess) -> None:
    os.kill(pid_of(renderer), signal.SIGSTOP)
    timer = threading.Timer(0.1, os.kill, (pid_of(renderer), signal.SIGKILL))
    timer.start()
    with pytest.raises(TryAgain, match="was killed"):
        renderer.render("x", {})
    timer.join()
    assert renderer.render("x", {}) == "x"


@pytest.mark.reliability("R-13")
def test_no_file_for_a_pipe_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*given: Any, **options: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(framed_child, "start_child", start)
    with pytest.raises(TryAgain, match="Too many open files"):
        TemplateProcess().render("x", {})
# -- without waiting ---------------------------------------------------------------------------------------------------


def test_a_render_that_may_not_wait_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop renders short chats itself: never behind another render, nor while the process starts."""
    process = TemplateProcess()
    monkeypatch.setattr(chat_template, "_process", process)
    chat = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    turns = [{"role": "user", "content": "a"}]
    try:
        with pytest.raises(RendererBusy):
            chat.render(turns, may_wait=False)           # not started yet
        assert chat.render(turns) == "a" == chat.render(turns, may_wait=False)
        with process._lock, pytest.raises(RendererBusy):
            chat.render(turns, may_wait=False)
        assert chat.render(turns, may_wait=False) == "a"
    finally:
        process.close()


def test_a_short_chat_does_not_wait_behind_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = TemplateProcess(), TemplateProcess()
    monkeypatch.setattr(chat_template, "_process", short)
    monkeypatch.setattr(chat_template, "_long_process", long)
    chat = ChatTemplate({"default": "{{ messages[0].content | length }}"}, {})
    try:
        with short._lock:
            assert chat.render([{"role": "user", "content": "a" * LONG_INPUT_BYTES}]) == str(LONG_INPUT_BYTES)
        with long._lock:
            assert chat.render([{"role": "user", "content": "a"}]) == "1"
    finally:
        short.close()
        long.close()

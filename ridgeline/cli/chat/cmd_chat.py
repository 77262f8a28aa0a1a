"""`ridgeline chat`: a conversation in the terminal, or over a pipe (a message per line in, an answer per message out).

The model runs in a process of its own, or in a server that is already running (`--url`).
"""

from __future__ import annotations

import argparse
import os

from ridgeline.cli.chat.conversation import Conversation
from ridgeline.cli.chat.local_model import MAX_TOKENS, LocalModel
from ridgeline.cli.chat.remote_model import RemoteModel
from ridgeline.cli.config_options import add_engine_options, add_model, engine_config
from ridgeline.cli.sampling_options import add_sampling_options, sampling_given
from ridgeline.cli.terminal import require_model
from ridgeline.errors import ConfigError
from ridgeline.process.log import quiet_by_default
from ridgeline.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.usage = "%(prog)s [MODEL] [PROMPT] [options]"
    parser.add_argument("message", nargs="?", default="", metavar="PROMPT", help="answer this message and end; also: --prompt")
    parser.add_argument("--prompt", default="", metavar="TEXT", help=argparse.SUPPRESS)
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--url", "--base-url", default="", metavar="URL",
                        help="talk to a running OpenAI-compatible server, such as http://127.0.0.1:8000, no model is loaded; "
                             "MODEL is then its model (default: the first). RIDGELINE_API_KEY or OPENAI_API_KEY holds the key")
    add_sampling_options(parser, MAX_TOKENS)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> None:
    quiet_by_default()                                   # the log shares the terminal with the conversation
    given = sampling_given(args)
    SamplingParams(**given)                              # a wrong value fails before anything is loaded
    if args.message and args.prompt:
        raise ConfigError("the prompt is given twice, as an argument and with --prompt; give one")
    prompt = args.message or args.prompt
    # `ridgeline chat 'Why is the sky blue?'`. Path.exists() would raise for a text that is longer than a file's name may be.
    if not prompt and len(args.model.split()) > 1 and not os.path.exists(args.model):
        args.model, prompt = "", args.model
    if args.url:
        Conversation(RemoteModel(args.url, args.model), given, args.system).run(prompt)
        return
    config = engine_config(args)
    require_model(config)
    with LocalModel(config) as model:
        conversation = Conversation(model, given, args.system)
        model.load(conversation.beginning())
        conversation.run(prompt)

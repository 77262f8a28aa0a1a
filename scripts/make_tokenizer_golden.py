"""Makes the golden token ids of tests/golden with llama.cpp, and compares Ridgeline with it on whole vocabularies.

    python scripts/make_tokenizer_golden.py make MODEL.gguf VOCABULARIES     writes tests/golden
    python scripts/make_tokenizer_golden.py compare FILE.gguf …              reports every text whose ids differ
    python scripts/make_tokenizer_golden.py patterns FILE.gguf               the same with every tokenizer.ggml.pre

It needs llama-cpp-python beside Ridgeline's own dependencies. MODEL.gguf is SmolLM2-135M-Instruct; VOCABULARIES is the
folder `models` of llama.cpp's sources, which holds vocabulary-only files. The texts are made from a fixed seed.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import random
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers/cases"), str(ROOT / "tests/models"), str(ROOT / "tests/text")]

from gguf_writer import Typed, write_gguf  # noqa: E402

from ridgeline.models.gguf import GGUFFile  # noqa: E402
from ridgeline.text.gguf_patterns import PRE_TOKENIZERS  # noqa: E402
from ridgeline.text.tokenizer import Tokenizer  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"

SENTENCES = """
The old lighthouse keeper counted 1,024 ships before breakfast, didn't he?
Die Straßenbahn fährt um 7:45 Uhr über die Brücke, und niemand weiß, wohin.
Le café déjà vu coûte 3,50 € — c'est l'été, n'est-ce pas ?
¿Dónde está el niño que comió la piña? ¡Mañana lo sabrá!
A ação do coração não é só ilusão; às vezes é pão.
Il perché è già lassù, però non c'è più né città né virtù.
Het ijs smelt langzaam, maar 's avonds vriest het weer.
Vi åkte skridskor på ön i går kväll, sade Åsa.
Blåbærsyltetøy smaker godt på brødskiver, ikke sant?
Á morgun förum við út að Þingvöllum og sjáum ðrúpandi vötn.
Yö oli jo pitkällä, kun hän kuuli äänen järveltä.
Õhtul sõidame üle jõe külla, ütles ema tütrele.
Ķekava, šķērsiela un žņaudzējčūska ir latviešu vārdi.
Žąsys ėjo per ežerą, o šuo lojo į mėnulį.
Zażółć gęślą jaźń, powiedział żółw o świcie.
Příliš žluťoučký kůň úpěl ďábelské ódy.
Kŕdeľ ďatľov učí koňa žrať kôru.
Az árvíztűrő tükörfúrógép hét éve jó.
Țara și gâsca așteaptă ploaia în câmpie.
Ђаци су у школи, а учитељ чита књигу о шуми.
Čovjek žuri kući jer đaci čekaju šećer.
Под старой липой спал рыжий кот, ему было 12 лет.
Ґанок під дубом скрипів; їжак її з'їв яблуко.
Ён піў ваду з крыніцы і ўсміхаўся.
Щурчето пееше цяла нощ, а ние слушахме.
Η γάτα κοιμάται πάνω στο παλιό τραπέζι· είναι ευτυχισμένη.
ἐν ἀρχῇ ἦν ὁ λόγος καὶ ὁ λόγος ἦν πρὸς τὸν θεόν
Լուսինը բարձրացավ լեռների վրա, և գետը փայլեց։
მთვარე ამოვიდა მთებზე და მდინარე ბრწყინავდა.
הילדה קראה סֵפֶר על הַיָּם, ואז הלכה לישון.
كَتَبَ الطالبُ الدرسَ في ١٢ دقيقة، ثم ذهب إلى البيت.
پرنده روی شاخه‌ی درخت نشست و می‌خواند.
یہ کتاب بہت اچھی ہے، لیکن قیمت ۳۵۰ روپے ہے۔
मौसम आज अच्छा है और हम नदी तक १५ मिनट चलेंगे।
আজ আকাশ মেঘলা, তবু আমরা নদীর ধারে যাব।
ਅੱਜ ਮੌਸਮ ਚੰਗਾ ਹੈ ਅਤੇ ਅਸੀਂ ਖੇਤ ਜਾਵਾਂਗੇ।
આજે હવામાન સારું છે અને અમે નદીએ જઈશું.
இன்று வானிலை நன்றாக உள்ளது, ஆற்றுக்கு நடப்போம்.
ఈ రోజు వాతావరణం బాగుంది, నదికి వెళ్దాం.
ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ, ನದಿಗೆ ಹೋಗೋಣ.
ഇന്ന് കാലാവസ്ഥ നല്ലതാണ്, നമുക്ക് പുഴയിലേക്ക് പോകാം.
අද කාලගුණය හොඳයි, අපි ගඟට යමු.
วันนี้อากาศดี เราเดินไปที่แม่น้ำกันเถอะ ๑๒๓
ມື້ນີ້ອາກາດດີ ພວກເຮົາຍ່າງໄປແມ່ນ້ຳ
ဒီနေ့ ရာသီဥတု ကောင်းတယ်၊ မြစ်ကို လမ်းလျှောက်ကြမယ်။
ថ្ងៃនេះអាកាសធាតុល្អ យើងដើរទៅទន្លេ។
དེ་རིང་གནམ་གཤིས་ཡག་པོ་འདུག ང་ཚོ་ཆུ་བོར་འགྲོ།
ዛሬ አየሩ ጥሩ ነው፤ ወደ ወንዙ እንሄዳለን።
ⵜⴰⵎⴰⵣⵉⵖⵜ ⵜⴻⵍⵍⴰ ⴷⴻⴳ ⵓⴷⵔⴰⵔ.
今天天气很好，我们走到河边去，大约需要15分钟。
昨晚下了一場大雨；龍門客棧的燈還亮著。
今日は天気がいいので、川まで１５分歩きましょう。カタカナもひらがなも。
ﾊﾝｶｸｶﾅと全角ＡＢＣ１２３、そして㍿と㌔。
오늘은 날씨가 좋으니 강까지 15분 걸어갑시다. 한국어 문장이에요.
Hôm nay trời đẹp, chúng ta đi bộ ra bờ sông nhé.
Bugün hava güzel; ırmağa kadar yürüyelim, İstanbul'un ışıkları.
Бүгін ауа райы жақсы, өзенге дейін жүрейік.
Өнөөдөр цаг агаар сайхан байна, гол руу алхъя.
ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ ᠤᠨ ᠦᠭᠡ
Leo hali ya hewa ni nzuri, twende mtoni.
Lónìí ojú ọjọ́ dára, ẹ jẹ́ ká lọ sí odò.
Yau yanayi yana da kyau; ɗan ƙauye ya ce ɓarawo ya gudu.
Namuhlanje izulu lihle, asiye emfuleni.
He rā pai tēnei, me haere tātou ki te awa.
ʻO kēia lā, maikaʻi ke aniau; e hele kākou i ke kahawai.
Cuaca hari ini bagus, mari kita berjalan-jalan ke sungai.
Hodiaŭ la vetero estas bela; ni ĉiuj iru al la ĝardeno.
Is fear Gaeilge bhriste ná Béarla cliste, a dúirt sí.
Mae'r tywydd yn braf heddiw; awn ni i'r afon, ŵyr bach.
Eguraldi ona dago gaur; goazen ibaira, ñirñir.
Avui fa bon temps; anem al riu col·lectivament.
Sot moti është i mirë, ndërsa dëbora shkrin.
Illum it-temp sabiħ; ejja mmorru ħdejn ix-xmara, għażiż.
Haut ass d'Wieder schéin, mir gi bei d'Musel.
ᐅᓪᓗᒥ ᓯᓚ ᐱᐅᔪᖅ, ᑰᒧᑦ ᐱᓱᓚᐅᕐᓗᑕ.
ᎣᏍᏓ ᎢᎦ ᎪᎯ ᎢᎦ.
𐌰𐍄𐍄𐌰 𐌿𐌽𐍃𐌰𐍂 𐌸𐌿 𐌹𐌽 𐌷𐌹𐌼𐌹𐌽𐌰𐌼
𓀀𓂀𓃠 𒀀𒁀𒂗 𝒜𝓁𝓅𝒽𝒶 𝟘𝟙𝟚 𝔄𝔅ℭ
ISO-8859-1's naïve façade: 50 % of “smart” ‘quotes’ — and … ellipses
""".strip().split("\n")

SNIPPETS = """
def f(x: int = 0x1F) -> list[str]:\\n    return [f"{x:>8}" for _ in range(10_000)]\\n
for (int i = 0; i < n; ++i) { a[i] += b[i] * 3.14e-10f; }
SELECT id, COUNT(*) FROM t WHERE name LIKE '%x_' GROUP BY 1 HAVING COUNT(*) >= 2;
<div class="a b"><p>Hello&nbsp;&amp; bye</p><!-- note --></div>
{"key": [1, 2.5, null, true], "nested": {"a\\\\n": "b"}}
\\\\begin{equation} \\\\int_0^\\\\infty e^{-x^2}\\\\,dx = \\\\frac{\\\\sqrt{\\\\pi}}{2} \\\\end{equation}
https://example.org:8080/path/to?q=1&r=%20two#frag-ment_3
user.name+tag@mail.example.co.uk, +49 (0)30 123-456
#!/bin/sh\\nset -euo pipefail\\nfind . -name '*.py' | xargs -n1 grep -l "x"\\n
fn main() { println!("{:?}", (1..=3).map(|x| x.pow(2)).collect::<Vec<_>>()); }
\\tif x:\\n\\t\\treturn\\n\\t\\t\\tpass\\n
a = b if c else d  # comment: it's what we'll do, they'd say I'm
| col | val |\\n|-----|----:|\\n| α   | 1.0 |\\n
diff --git a/x b/x\\n@@ -1,2 +1,2 @@\\n-old\\n+new\\n
WE'LL SEE IF THEY'RE HERE, I'VE SAID; IT'S 'TIS 'twas o'clock rock'n'roll
it’s they’re I’ve we‘ll ‘quoted’ "double" „low“ «angle» ‹single›
'S 'T 'RE 'VE 'M 'LL 'D 's 't 're 've 'm 'll 'd 'ſ 'K 'x ' ''' '''s
camelCaseAndPascalCase snake_case_and_more kebab-case-here SCREAMING_SNAKE XMLHttpRequest iPhone15ProMax
0123456789 00 007 1e10 1.2.3.4 1,234,567.89 0b1010 12345678901234567890 3rd 2nd 21st x2 y10z
½ ⅓ ² ³ ₁₂ Ⅷ ⅻ ① ㊿ ፩ ௧௨ ٣٤ ۵۶ ४५ ৬৭ 𝟜𝟝 ５６ 〇一二三 Ⅳ.
$100 €200 £300 ¥400 ₹500 ₿1 50% 10‰ ±5 ×2 ÷3 √2 ∞ ≠ ≤ ≥ ∑ ∫ ∂ ∇ → ⇒ ↔ ⟨x⟩
(((nested))) [[brackets]] {{braces}} <<angles>> ---- ==== **** //// \\\\\\\\ ???? !!!! .... ,,,, ;;;; ::::
🙂 😀😃😄 👍🏽 👩‍💻 👨‍👩‍👧‍👦 🏳️‍🌈 🏴‍☠️ 🇩🇪🇯🇵🇧🇷 🧑🏿‍🚀 ❤️ ☺︎ ☺️ 1️⃣ #️⃣ ©️ 🫠 🪿 🏴󠁧󠁢󠁳󠁣󠁴󠁿
é é ñ ñ ệ ệ Å Å ﬁ ﬂ ǅ ß ẞ İ ı ſ ŉ
Z̷̡̢̛̛a̷͎͉l̶g̴̢o̵ t̸e̶x̷t̵
a​b‌c‍d⁠e﻿f­g
x y z t　u w᠎v q
""".strip().split("\n")

BLANKS = [
    "  ", " ", "   ", "\n", "\n\n", "\t", "\r\n", "\r", "\v", "\f", "\x85", "\u00a0", "\u2003", "\u3000", "\u2028",
    "\u200b", " \n", "\n ", "\t \t", " " * 7, " " * 16, " " * 31, "\n" * 5, "\t" * 6, "\r\n\r\n", "\n\t\n  ",
]
SPECIALS = """
<|im_start|> <|im_end|> <|endoftext|> <repo_name> <file_sep> <|begin_of_text|> <|eot_id|> <|start_header_id|>
<|end_header_id|> <s> </s> <unk> <|user|> <|assistant|> <|end|> <|system|> <bos> <eos> <start_of_turn> <end_of_turn>
[INST] [/INST] <<SYS>> <0x0A> <0xFF> <jupyter_start> <issue_comment> <|vision_start|> <tool_call> </tool_call> <unused1>
""".split()
NEARLY_SPECIAL = [
    "<|im_start", "im_end|>", "<|im_start|", "<|IM_END|>", "<| im_end |>", "<|im_<|im_end|>end|>", "<|", "|>",
    "<|im_start|><|im_start|>", "<<|im_end|>>", "<|endoftext|", "＜|im_end|＞", "<s", "/s>", "< s>", "<0x0a>",
]


def texts() -> list[str]:
    """The test set: every sentence and snippet, their parts and mixtures, blanks, special tokens, random characters."""
    rng = random.Random(20240)
    snippets = [snippet.encode().decode("unicode_escape").encode("latin-1").decode() for snippet in SNIPPETS]
    whole = SENTENCES + snippets
    words = [word for text in whole for word in text.split()]
    found = ["", *whole, *BLANKS, *SPECIALS, *NEARLY_SPECIAL]
    found += [f"{blank}x{blank}{blank}1{blank}" for blank in BLANKS]
    found += [f"a{special} b\n{special}{special}  c{special}" for special in SPECIALS]
    found += [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in whole[::4]]
    found += [text.upper() for text in whole[::5]] + [text.replace(" ", "") for text in whole[::5]]
    found += [unicodedata.normalize("NFD", text) for text in whole[::6]]
    found += [chr(code) for code in range(0x80)] + [f"a{chr(code)}b{chr(code)}{chr(code)} 1" for code in range(0x21)]
    found += [str(rng.randrange(10 ** rng.randrange(1, 22))) for _ in range(30)]
    found += [" " * count + "x" for count in range(1, 40, 3)] + ["\n" * count + "y" for count in range(1, 20, 3)]
    found += [sign * count for sign in "-=*#_.a1é你🙂" for count in (2, 3, 5, 8, 17, 33)]
    for _ in range(330):
        gaps = [" ", " ", " ", "", *BLANKS]
        found.append("".join(rng.choice(words) + rng.choice(gaps) for _ in range(rng.randrange(2, 9))))
    for _ in range(80):
        parts = [rng.choice(kind) for kind in (words, SPECIALS, NEARLY_SPECIAL, BLANKS, words)]
        rng.shuffle(parts)
        found.append("".join(parts))
    for _ in range(260):
        found.append("".join(random_characters(rng, rng.randrange(1, 16))))
    for _ in range(120):
        found.append("".join(rng.choice("aAbBsStTzZ019 '\n\t.,-é中\u0301") for _ in range(rng.randrange(1, 40))))
    return list(dict.fromkeys(found))


def random_characters(rng: random.Random, count: int) -> Iterator[str]:
    """Mostly assigned ones, from anywhere; now and then a code point that is nothing."""
    while count:
        code = rng.choice([rng.randrange(limit) for limit in (0x300, 0x3000, 0x10000, 0x110000)])
        category = unicodedata.category(chr(code))
        if category != "Cs" and (category != "Cn" or rng.random() < 0.05):
            count -= 1
            yield chr(code)


class LlamaCpp:
    """llama.cpp's tokenizer of one file."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self.library = llama_cpp
        # Its log goes nowhere; the callback must live as long as the library may call it.
        self.log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.log, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot read {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        room = len(data) * 2 + 16
        tokens = (self.library.llama_token * room)()
        count = self.library.llama_tokenize(self.vocab, data, len(data), tokens, room, add_special, parse_special)
        return list(tokens[:count])

    def close(self) -> None:
        self.library.llama_model_free(self.model)


def compare(path: Path) -> int:
    """Report the texts on which Ridgeline and llama.cpp differ; returns how many."""
    ours, theirs = Tokenizer.load(path), LlamaCpp(path)
    differing = 0
    for text in texts():
        # Recent llama.cpp takes </s> for a control token even where the vocabulary has it as an ordinary one (Qwen).
        if "</s>" in text and ours.token_id("</s>") not in ours.special_ids:
            continue
        for add_special, parse_special in ((True, True), (False, False)):
            expected = theirs.encode(text, add_special, parse_special)
            got = ours.encode(text, add_special, parse_special)
            if got != expected:
                differing += 1
                print(f"{path.name}: {text!r} parse_special={parse_special}\n  llama.cpp {expected}\n  ridgeline {got}")
    theirs.close()
    return differing


def compare_patterns(path: Path) -> int:
    """One byte-level vocabulary, cut up in every way Ridgeline knows."""
    with GGUFFile(path) as file:
        metadata = {
            key: Typed("uint32", value) if key.endswith("_id") else Typed("int32", value) if key.endswith("_type") else value
            for key, value in file.metadata.items()
            if key.startswith(("tokenizer.", "general.architecture"))
        }
    differing = 0
    with TemporaryDirectory() as folder:
        for name in PRE_TOKENIZERS:
            metadata["tokenizer.ggml.pre"] = name
            found = compare(write_gguf(Path(folder) / f"{name}.gguf", metadata, {}))
            print(f"{name}: {found} differ")
            differing += found
    return differing


def write_golden(vocabulary: Path, name: str, chosen: list[str], every: int) -> None:
    """The ids of every `every`th text. Those without parsing special tokens are kept where they differ."""
    theirs = LlamaCpp(vocabulary)
    ids, plain_ids = [], {}
    for place, text in enumerate(chosen[::every]):
        ids.append(theirs.encode(text, add_special=True, parse_special=True))
        plain = theirs.encode(text, add_special=True, parse_special=False)
        if plain != ids[-1]:
            plain_ids[place] = plain
    write_json(GOLDEN / f"{name}.json.gz", {
        "made_by": f"llama-cpp-python {theirs.library.__version__}", "every": every, "ids": ids, "plain_ids": plain_ids,
    })
    theirs.close()
    print(f"{name}: {len(ids)} texts, {sum(map(len, ids))} ids")


def write_json(path: Path, value: Any) -> None:
    data = json.dumps(value, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))


# --- small vocabularies cut out of whole ones ---

GENERAL = """
general.architecture general.name tokenizer.ggml.model tokenizer.ggml.pre tokenizer.chat_template
tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token tokenizer.ggml.add_space_prefix
""".split()
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


def cut(source: Path, keep: Callable[[dict[str, Any]], Iterable[int]]) -> Path:
    """Write the vocabulary with only the tokens `keep` names, renumbered, and the merges that still make sense."""
    with GGUFFile(source) as file:
        metadata = file.metadata
    prefix = "tokenizer.ggml."
    kept = sorted(set(keep(metadata)))
    number = {old: new for new, old in enumerate(kept)}
    tokens = [metadata[prefix + "tokens"][old] for old in kept]
    written: dict[str, Any] = {key: metadata[key] for key in GENERAL if key in metadata}
    written[prefix + "tokens"] = tokens
    written[prefix + "token_type"] = Typed("int32", [metadata[prefix + "token_type"][old] for old in kept])
    if "tokenizer.ggml.scores" in metadata:
        written[prefix + "scores"] = Typed("float32", [metadata[prefix + "scores"][old] for old in kept])
    if "tokenizer.ggml.merges" in metadata:
        known = set(tokens)
        written[prefix + "merges"] = [
            merge for merge in metadata[prefix + "merges"]
            if "".join(parts := merge.split(" ")) in known and known.issuperset(parts)
        ]
    for key in ("bos", "eos", "unknown", "padding"):
        old = metadata.get(f"{prefix}{key}_token_id")
        if old in number:
            written[f"{prefix}{key}_token_id"] = Typed("uint32", number[old])
    return write_gguf(GOLDEN / f"{source.stem.removeprefix('ggml-vocab-')}-small.gguf", written, {})


def byte_level_tokens(common: int, used: Iterable[int]) -> Callable[[dict[str, Any]], Iterable[int]]:
    """The bytes and the commonest merges, some tokens of the texts whose merges are gone, and a few special tokens."""

    def keep(metadata: dict[str, Any]) -> Iterable[int]:
        types = metadata["tokenizer.ggml.token_type"]
        special = [place for place, kind in enumerate(types) if kind != NORMAL]
        return [*range(common), *used, *special[:12]]

    return keep


def sentencepiece_tokens(common: int) -> Callable[[dict[str, Any]], Iterable[int]]:
    """All that is not ordinary, the best tokens by score with all their characters, and characters of the texts."""

    def keep(metadata: dict[str, Any]) -> Iterable[int]:
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        ids = {token: place for place, token in enumerate(tokens)}
        other = [place for place, kind in enumerate(types) if kind != NORMAL]
        best = [place for place, kind in enumerate(types) if kind == NORMAL][:common]
        characters = {character for place in best for character in tokens[place]} | set("".join(SENTENCES[:30]))
        # Runs of spaces share one score, and llama.cpp merges equals from the left: our order only if all are there.
        runs = [place for place, token in enumerate(tokens) if set(token) == {"▁"}]
        return [*other, *best, *runs, *(ids[character] for character in characters if character in ids)]

    return keep


def with_gemma_habits(source: Path) -> Path:
    """The small SentencePiece vocabulary as Gemma has it: no prefix space, runs of blanks and tags as tokens."""
    with GGUFFile(source) as file:
        metadata = dict(file.metadata)
    added = ["<start_of_turn>", "<end_of_turn>", "<table>", "</p>", "[@BOS@]", "\t\t"]
    added += [blank * count for blank in "\n " for count in (2, 3, 4)]
    kinds = [CONTROL, CONTROL] + [USER_DEFINED] * (len(added) - 2)
    prefix = "tokenizer.ggml."
    metadata[prefix + "tokens"] += added
    metadata[prefix + "token_type"] = Typed("int32", metadata[prefix + "token_type"] + kinds)
    metadata[prefix + "scores"] = Typed("float32", metadata[prefix + "scores"] + [-1000.0] * len(added))
    metadata[prefix + "add_space_prefix"] = False
    for key in ("bos", "eos", "unknown"):
        metadata[f"{prefix}{key}_token_id"] = Typed("uint32", metadata[f"{prefix}{key}_token_id"])
    return write_gguf(GOLDEN / "gemma-like-small.gguf", metadata, {})


def make(model: Path, vocabularies: Path) -> None:
    GOLDEN.mkdir(exist_ok=True)
    chosen = texts()
    write_json(GOLDEN / "texts.json.gz", chosen)
    write_golden(model, "smollm2", chosen, every=1)
    for name, common in (("llama-bpe", 1700), ("qwen2", 2400)):
        source = vocabularies / f"ggml-vocab-{name}.gguf"
        theirs = LlamaCpp(source)
        used = {token for text in SENTENCES[:60] for token in theirs.encode(text, False, False)}
        theirs.close()
        small = cut(source, byte_level_tokens(common, used))
        write_golden(small, small.stem, chosen, every=3)
    small = cut(vocabularies / "ggml-vocab-llama-spm.gguf", sentencepiece_tokens(2500))
    write_golden(small, small.stem, chosen, every=3)
    write_golden(with_gemma_habits(small), "gemma-like-small", chosen, every=3)
    small = cut(vocabularies / "ggml-vocab-phi-3.gguf", sentencepiece_tokens(1000))
    write_golden(small, small.stem, chosen, every=5)
    print(f"{sum(file.stat().st_size for file in GOLDEN.iterdir()):,} bytes in {GOLDEN}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("model", type=Path)
    making.add_argument("vocabularies", type=Path)
    for name in ("compare", "patterns"):
        commands.add_parser(name).add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.model, arguments.vocabularies)
    else:
        check = compare if arguments.command == "compare" else compare_patterns
        if sum(check(file) for file in arguments.files):
            raise SystemExit(1)


if __name__ == "__main__":
    main()

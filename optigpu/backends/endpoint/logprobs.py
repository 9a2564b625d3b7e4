"""Log-probabilities that a server returns: in which interface, for how many tokens, and which tokens they are of.

A server that tells those of a prompt is asked once for each window of a text; another one at each position, for the
token that follows. Prompts are sent as token ids, so that the server predicts after the very tokens of the reference.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from pydantic import AliasChoices, BaseModel, Field, ValidationError
from tokenizers import Tokenizer

from optigpu.backends.endpoint.client import StreamError
from optigpu.documents.endpoints import Endpoint
from optigpu.quality.passages import Passage
from optigpu.quality.told import LEAST_LOG, SUMMING, Telling, Told
from optigpu.vocabulary import OptiGPUError, UnsupportedError

MOST = (1000, 100, 20, 5)
"""So many tokens are asked for at each position: the first number that the server takes."""
LANES = 8
"""Sums in float32 that run beside each other at least, but for llama-server's single one: so many has a vector of
torch's on the smallest CPU, numpy in blocks, and a GPU more."""
LEAST_SHARE = 0.5
"""Of the tokens that a server returns, so many at least are written as by the job's model; special ones may differ."""
_BY_ID = "token_id:"


class _Token(BaseModel):
    id: int | None = None
    text: str | None = Field(None, validation_alias=AliasChoices("token", "decoded_token"))
    logprob: float | None = None


class _Place(_Token):
    top_logprobs: tuple[_Token, ...] = ()


class _Logprobs(BaseModel):
    """In OpenAI's older form, by the tokens' texts, or in the newer one."""

    tokens: tuple[str, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[dict[str, float | None] | None, ...] | None = None
    content: tuple[_Place, ...] | None = None


class _Choice(BaseModel):
    logprobs: _Logprobs | None = None
    prompt_logprobs: tuple[dict[int, _Token] | None, ...] | None = None


class _Answer(BaseModel):
    choices: tuple[_Choice, ...] = ()
    completion_probabilities: tuple[_Place, ...] = ()


Tokens = Sequence[_Token]
"""Of one position."""


def _of_prompt(answer: _Answer) -> list[Tokens]:
    told = answer.choices[0].prompt_logprobs if answer.choices else None
    return [
        [token.model_copy(update={"id": number}) for number, token in (each or {}).items()]
        for each in told or ()
    ]


def _by_text(answer: _Answer) -> list[Tokens]:
    """Each position's most likely tokens, and the one that is there."""
    told = answer.choices[0].logprobs if answer.choices else None
    if told is None or told.tokens is None or told.token_logprobs is None:
        return []
    tops = told.top_logprobs or (None,) * len(told.tokens)
    places = zip(told.tokens, told.token_logprobs, tops, strict=False)
    return [
        [_Token(token=text, logprob=log) for text, log in ((top or {}) | {own: its}).items()]
        for own, its, top in places
    ]


def _next(places: Sequence[_Place]) -> list[Tokens]:
    return [[*place.top_logprobs, place] for place in places[:1] if place.top_logprobs]


def _of_next(answer: _Answer) -> list[Tokens]:
    told = answer.choices[0].logprobs if answer.choices else None
    return _next(told.content) if told and told.content else _by_text(answer)[:1]


@dataclass(frozen=True)
class Way:
    """One interface: the fields that ask for so many tokens, and how the answer is read. With `of_prompts` one answer
    has all positions. That `of_llama_server` takes any number, and a `chat` takes text."""

    label: str
    fields: Callable[[int], Mapping[str, object]]
    read: Callable[[_Answer], list[Tokens]]
    of_prompts: bool = False
    of_llama_server: bool = False
    chat: bool = False

    def address(self, endpoint: Endpoint) -> str:
        """Where a server has it."""
        if self.of_llama_server:
            return f"{endpoint.origin}/completion"
        return f"{endpoint.api}{'/chat' * self.chat}/completions"


_ONE: dict[str, object] = {"max_tokens": 1, "temperature": 0}
WAYS = (
    Way("prompt_logprobs", lambda most: _ONE | {"prompt_logprobs": most}, _of_prompt, of_prompts=True),
    Way(
        "echo, logprobs",
        lambda most: _ONE | {"echo": True, "logprobs": most, "return_tokens_as_token_ids": True},
        _by_text,
        of_prompts=True,
    ),
    Way(
        "n_probs",
        lambda most: {"n_predict": 1, "n_probs": most, "cache_prompt": True, "post_sampling_probs": False},
        lambda answer: _next(answer.completion_probabilities),
        of_llama_server=True,
    ),
    Way("logprobs", lambda most: _ONE | {"logprobs": most, "return_tokens_as_token_ids": True}, _of_next),
)
"""vLLM's, that of OpenAI's older completions, llama-server's, and that of completions without an echo."""
CHAT = Way(
    "chat, top_logprobs", lambda most: _ONE | {"logprobs": True, "top_logprobs": most}, _of_next, chat=True
)
"""A server writes the turns of a chat in words of its own, so that only two servers can be compared by it."""
Ask = Callable[[Way, Mapping[str, object]], bytes]
"""Sends a request to the server and gives its answer. Raises StreamError for a refusal, OptiGPUError for no answer."""


class Vocabulary:
    """The texts of a model's tokens, each as it is within a text."""

    def __init__(self, tokenizer: Tokenizer | None, size: int) -> None:
        """Without a tokenizer tokens are known by their ids alone."""
        self._tokenizer, self.size = tokenizer, size

    @cached_property
    def texts(self) -> Sequence[str]:
        """By id; empty without a tokenizer."""
        if self._tokenizer is None:
            return ()
        before = self._tokenizer.encode("a", add_special_tokens=False).ids
        pairs = [[*before, number] for number in range(self.size)]
        skipped = len(self._tokenizer.decode(before))
        found = self._tokenizer.decode_batch(pairs, skip_special_tokens=False)
        return [text[skipped:] for text in found]

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises UnsupportedError without one."""
        if self._tokenizer is None:
            raise UnsupportedError(
                "There is no tokenizer of the model on this machine; copy its tokenizer.json into the model's folder."
            )
        return self._tokenizer

    @cached_property
    def _ids(self) -> Mapping[str, int | None]:
        """By text; None where several tokens have it."""
        found: dict[str, int | None] = {}
        for number, text in enumerate(self.texts):
            found[text] = None if text in found else number
        return found

    def id_of(self, token: _Token) -> int | None:
        """The id as the server says it, or by the token's text; None where the text is that of none or of several."""
        number, text = token.id, token.text or ""
        if number is None:
            by_id = text.removeprefix(_BY_ID)
            number = int(by_id) if by_id != text and by_id.isdecimal() else self._ids.get(text)
        return number if number is not None and 0 <= number < self.size else None

    def compared(self, tokens: Tokens) -> str:
        """How tokens that were returned are those of this vocabulary. Raises UnsupportedError where they are not."""
        if not self.texts:
            if any(self.id_of(each) is None for each in tokens):
                _ = self.tokenizer
            return "not compared: there is no tokenizer of the model on this machine"
        texts = [(self.id_of(each), each.text.strip()) for each in tokens if each.text]
        # Without those that are blank, or a part of a character.
        shown = [each for each in texts if each[1] and "\ufffd" not in each[1] and _BY_ID not in each[1]]
        same = sum(number is not None and self.texts[number].strip() == text for number, text in shown)
        if same < LEAST_SHARE * len(shown):
            raise UnsupportedError(
                f"Of {len(shown)} tokens that the server returned, {len(shown) - same} are not written as those of the "
                "job's model: its tokenizer is another one; name the model that it serves."
            )
        return f"{same} of {len(shown)} returned tokens are written as those of the job's model"


@dataclass(frozen=True)
class Asking:
    """A server that is asked in one way for so many tokens at each position."""

    ask: Ask
    words: Vocabulary
    way: Way
    most: int

    def tokens(self, prompt: list[int], most: int) -> list[Tokens]:
        """By position; empty where the answer has no log-probabilities."""
        given: dict[str, object] = {"prompt": prompt}
        if self.way.chat:
            given = {"messages": [{"role": "user", "content": self.words.tokenizer.decode(prompt)}]}
        answer = self.ask(self.way, {**self.way.fields(most), **given})
        try:
            return self.way.read(_Answer.model_validate_json(answer))
        except ValidationError:
            return []

    def told(self, passages: Sequence[Passage], targets: bool) -> Generator[Told, None, None]:
        """By one request for each passage, or for each position."""
        position = 0
        for passage in passages:
            tokens = passage.tokens.tolist()
            whole = self._known(tokens, self.most, len(tokens)) if self.way.of_prompts else []
            for place in range(passage.first, len(tokens)):
                target, before = tokens[place], tokens[:place]
                found = whole[place] if whole else self._known(before, self.most)[0]
                told = self._told(position, target, found)
                if targets and self.way.of_llama_server and target not in told.tokens:
                    told = self._told(position, target, self._known(before, self.words.size)[0])
                yield told
                position += 1

    def _known(self, prompt: list[int], most: int, places: int = 1) -> list[Tokens]:
        found = self.tokens(prompt, most)
        if len(found) < places:
            raise OptiGPUError(
                f"The server told log-probabilities of {len(found)} positions instead of {places}, for a prompt of "
                f"{len(prompt)} tokens."
            )
        return found

    def _told(self, position: int, target: int, tokens: Tokens) -> Told:
        by_id: dict[int, float] = {}
        first, most_likely, seen = None, -np.inf, set()
        for token in tokens:
            number, log = self.words.id_of(token), token.logprob
            seen.add(number)
            if log is None or not log > LEAST_LOG:
                continue
            if log > most_likely:
                first, most_likely = number, log
            if number is not None:
                by_id[number] = log
        logs = np.array(list(by_id.values()))
        common = self.words.size * SUMMING / (1 if self.way.of_llama_server else LANES)
        if None not in seen and len(seen) == self.words.size:
            # All are told: what their sum differs from 1 by is the server's rounding.
            logs, common = logs - np.log(np.exp(logs).sum()), 0.0
        return Told(position, target, np.array(list(by_id), np.int64), np.minimum(logs, 0.0), first, common)


def telling_of(
    ask: Ask, words: Vocabulary, prompt: list[int], asked: int | None, ways: Sequence[Way] = WAYS
) -> Telling:
    """How the server tells log-probabilities of up to `asked` tokens, found by asking for those of a short prompt in
    each way. Raises UnsupportedError where it tells none, with what it said, and where its tokens are others."""
    said = "It ignores what asks for them."
    first = () if asked is None else (min(asked, words.size),)
    for way, most in product(ways, first + tuple(each for each in MOST if not first or each < first[0])):
        asking = Asking(ask, words, way, most)
        try:
            found = asking.tokens(prompt, most)
        except StreamError as error:
            said = str(error)
            continue
        if told := [token for tokens in found for token in tokens if token.logprob is not None]:
            return Telling(way.label, most, words.compared(told), asking.told)
    names = "; ".join(way.label for way in ways)
    raise UnsupportedError(
        f"The server returns no log-probabilities after given tokens, so its quality is not known (asked for {names}). "
        f"{said}"
    )

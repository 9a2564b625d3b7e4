"""The model card, written from what was measured."""

import math

from tools.bundled_model.architectures import Architecture
from tools.bundled_model.evaluation import PROMPT, TEMPERATURE, Int8Loss, Score
from tools.bundled_model.text import HELD_OUT, VOCABULARY, Document
from tools.bundled_model.training import LONG_WINDOW, SHORT_WINDOW, TOKENS_PER_STEP, Recipe

_CARD = """# bundled:{name}

A {family} of {weights:,} weights that was trained from nothing on public-domain books and a part of WikiText-2. It is
in the package so that quality can be measured with no network: its weights behave like trained ones, which random
weights do not. It writes English sentences; it knows nothing and is of no other use.

| | |
|---|---|
| architecture | {described} |
| tokenizer | byte-level BPE as GPT-2's, {vocabulary} tokens, of which `<\\|endoftext\\|>` is the only special one |
| weights | `model.safetensors`, fp16, {size_bytes:,} bytes, SHA-256 `{sha256}` |
| licence | the books are out of copyright; WikiText-2 is CC BY-SA, by the authors of Wikipedia |

## How good it is

Perplexity for each token. All three columns predict the same tokens of the same vocabulary; the n-gram models were
counted on the training text. The unigram is add-one smoothed, the trigram is interpolated Kneser-Ney with one discount
for each order. The model reads windows of {long} tokens side by side, a file's first after `<|endoftext|>`.

| text | tokens | model | trigram | unigram | bits per byte |
|---|---|---|---|---|---|
{scores}

The held-out text is the last {held_out:.0%} of each file below; the recipe and the step were chosen by
it. WikiText-2's test part was seen by neither training nor tokenizer; it is another kind of text than most of
what the model learned from.

`int8_weight_only` against fp32 on {int8_tokens:,} held-out tokens: divergence {kld_mean:.2e} nats on average,
{kld_p99:.2e} at the 99th percentile; the most likely token is the same for {top1:.2%} of them.

What it writes after "{prompt}" (temperature {temperature}, seed {seed}, the first try):

> {sample}

## How it was made

`python -m tools.train_bundled {name} --data DIR` in the repository. All that is random follows from the seed and the
step, so a machine makes the same weights again, also when the run was interrupted.

- {steps:,} steps of {tokens_per_step:,} tokens, {tokens_seen:,} in all, {epochs:.1f} times the training text of
  {train_tokens:,} tokens; windows of {short} tokens at shifting positions, {long} in the last quarter. The weights are
  those of step {best_step:,}, which had the lowest held-out loss with the long window.
- AdamW (0.9, 0.95), weight decay {weight_decay}, gradients clipped at 1; learning rate {learning_rate} with {warm_up}
  steps of warm-up, then three quarters of a cosine, multiplied by a linear way to nothing in the last third;
  {dropped}; seed {seed}; bf16 arithmetic on fp32 weights.
- {minutes:.0f} minutes on {machine}, {threads}; torch {torch}, transformers {transformers}.
- The text is as it is in the files: line breaks of the books, and WikiText's ` @-@ ` and `<unk>`, were left.

| file | SHA-256 |
|---|---|
{files}
"""


def render_card(
    architecture: Architecture,
    recipe: Recipe,
    documents: list[Document],
    scores: dict[str, Score],
    int8: Int8Loss,
    facts: dict[str, str | int | float],
) -> str:
    """The card as Markdown. `facts` are what the script knows beside: sizes, hashes, times, versions, the sample."""
    values = facts | vars(recipe)
    dropped = f"dropout {architecture.dropout:g} in the first {recipe.dropout_steps:,} steps"
    sample = str(facts["sample"]).strip().replace("\n", "\n> ")
    return _CARD.format_map(
        values
        | {
            "family": architecture.family,
            "described": architecture.described,
            "dropped": dropped if architecture.dropout else "no dropout",
            "vocabulary": VOCABULARY,
            "short": SHORT_WINDOW,
            "long": LONG_WINDOW,
            "held_out": HELD_OUT,
            "scores": "\n".join(_row(name, each) for name, each in scores.items()),
            "int8_tokens": int8.tokens,
            "kld_mean": int8.kld_mean,
            "kld_p99": int8.kld_p99,
            "top1": int8.top1_agreement,
            "prompt": PROMPT,
            "temperature": TEMPERATURE,
            "sample": "\n".join(line.rstrip() for line in sample.splitlines()),
            "tokens_per_step": TOKENS_PER_STEP,
            "tokens_seen": recipe.steps * TOKENS_PER_STEP,
            "epochs": recipe.steps * TOKENS_PER_STEP / int(facts["train_tokens"]),
            "files": "\n".join(f"| {each.name} | `{each.sha256}` |" for each in documents),
        }
    )


def _row(name: str, score: Score) -> str:
    model, trigram, unigram = (math.exp(each) for each in (score.model, score.trigram, score.unigram))
    columns = (name, f"{score.tokens:,}", f"{model:.1f}", f"{trigram:.1f}", f"{unigram:.1f}")
    return f"| {' | '.join(columns)} | {score.bits_per_byte:.3f} |"

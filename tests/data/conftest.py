"""A byte-level BPE tokenizer built in memory, and chat templates in the styles that models come with."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>"]
WORDS = ["How are you? I am fine, thank you.", "user assistant system tool", "say ok yes no", "<think> </think>"] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (  # no header, no line break, and a space that belongs to the answer
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] | trim + ' </s>' }}"
    "{% endif %}{% endfor %}"
)
MERGING = (  # the space stands in the prompt, yet the tokenizer joins it to the answer's first word
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'Q: ' + message['content'] + '\nA: ' }}"
    "{% else %}{{ message['content'] + '</s>' }}{% endif %}{% endfor %}"
)
LLAMA3 = (  # trims every message
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|user|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '</s>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|user|>assistant<|end|>\n\n' }}{% endif %}"
)
PHI = (  # closes the whole conversation with a second token
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '</s>' }}{% endif %}"
)
PLAIN = (  # no special token at all
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
HARMONY = (  # the last turn ends differently from the others
    "{% for message in messages %}{{ '<|user|>' + message['role'] + '<|im_start|>' + message['content'] }}"
    "{{ '</s>' if loop.last and message['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant<|im_start|>' }}{% endif %}"
)
THINKING = (  # drops the thinking of turns before the last question, shows it (or an empty block) after it
    "{% set last = namespace(user=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% set content = message['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = message['content'].split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in message['content'] else '' %}"
    "{% if loop.index0 > last.user and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ content }}{% for call in message.tool_calls or [] %}"
    "{{ '\n' if content or not loop.first }}{{ '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}"
    "{% endfor %}{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING_MARKED = THINKING.replace("{% if loop.index0 > last", "{% generation %}{% if loop.index0 > last").replace(
    "{% endfor %}{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}",
    "{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
FILLING = (  # the prompt opens the thinking, a finished turn closes it at once
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% else %}{{ '<|assistant|></think>' + message['content'] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
)
OPENING = (  # the prompt opens the thinking, a finished turn shows none
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% else %}{{ '<|assistant|>' + message['content'].split('</think>')[-1] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
ANNOUNCING = (  # the prompt goes on in plain words that a finished turn does not show
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>Here are my reasons:\n' }}{% endif %}"
)
STRICT = "{% for message in messages %}{{ raise_exception('Only turn and turn about') }}{% endfor %}"
DEAF = CHATML.replace("in messages %}", "in messages if message['role'] != 'tool' %}")
SILENT = "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}{% endfor %}"

TEMPLATES = {
    "chatml": CHATML,
    "marked": MARKED,
    "marked without end": MARKED.replace(
        "'] + '<|im_end|>' }}{% endgeneration %}{{ '", "'] }}{% endgeneration %}{{ '<|im_end|>"
    ),
    "marked with header": MARKED.replace("{{ '<|im_start|>' + message['role'] + '\n' }}{% if", "{% if")
    .replace("{% generation %}{{", "{% generation %}{{ '<|im_start|>assistant\n' +")
    .replace(
        "%}{{ message['content'] + '<|im_end|>\n' }}",
        "%}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}",
    ),
    "marked with line break": MARKED.replace("|>' }}{% endgeneration %}{{ '\n' }}", "|>\n' }}{% endgeneration %}"),
    "llama2": LLAMA2,
    "merging": MERGING,
    "llama3": LLAMA3,
    "phi": PHI,
    "plain": PLAIN,
    "harmony": HARMONY,
    "thinking": THINKING,
    "opening": OPENING,
    "filling": FILLING,
    "announcing": ANNOUNCING,
    "thinking marked": THINKING_MARKED,
    "strict": STRICT,
    "deaf": DEAF,
    "silent": SILENT,
}


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """A function from the name of a template to a tokenizer that has it."""

    def make(template: str = "chatml", adds_bos: bool = False) -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(WORDS, trainer)
        if adds_bos:
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES[template]
        )

    return make

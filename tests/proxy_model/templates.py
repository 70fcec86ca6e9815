"""Chat templates in the manner of known families, shortened to what shapes a conversation of texts."""

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

# A default system prompt, results of tools inside the user's turn, and `<think>` for answers after the last question.
QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + message.content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# A begin token, contents trimmed, a system header always there, results of tools quoted as JSON.
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\\n' }}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# The instructions open the first user's words, roles must alternate, there are no tools.
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = '' -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}
    {{- message['content'] | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

# The same without instructions of any form: Gemma 1 and 2.
GEMMA_NO_SYSTEM = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}"""

# Instructions inside the first question, answers bare between brackets.
BRACKETS = """\
{{ bos_token }}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {%- if not loop.first -%}{{ raise_exception('system comes first') }}{%- endif -%}
        {{ '[INST] <<SYS>>\\n' + message['content'] + '\\n<</SYS>>\\n\\n' }}
    {%- elif message['role'] == 'user' -%}
        {%- if loop.first or messages[loop.index0 - 1]['role'] != 'system' -%}{{ '[INST] ' }}{%- endif -%}
        {{ message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' -%}
        {{ ' ' + message['content'] + eos_token }}
    {%- else -%}
        {{ raise_exception('unknown role') }}
    {%- endif -%}
{%- endfor -%}"""

# Refuses whatever is not usual: no question at all, instructions that do not come first, an unknown role.
STRICT = """\
{%- if not messages | selectattr('role', 'equalto', 'user') | list -%}
    {{ raise_exception('No user query found in messages.') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' and not loop.first -%}
        {{ raise_exception('System message must be at the beginning.') }}
    {%- elif message['role'] not in ('system', 'user', 'assistant', 'tool') -%}
        {{ raise_exception('Unexpected message role.') }}
    {%- endif -%}
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor -%}"""

FAMILIES = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "gemma-no-system": GEMMA_NO_SYSTEM,
    "brackets": BRACKETS,
    "strict": STRICT,
}

"""Fields of a ``config.json``, each checked as it is read, and what is left over at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from overlapsim.errors import WorkloadError
from overlapsim.plan import Finding
from overlapsim.workload.model import check_num_layers, check_size, shown

_HARMLESS_WORDS: Final = """
architectures auto_map model_type transformers_version tokenizer_class task_specific_params _name_or_path
bos_token_id eos_token_id pad_token_id pad_id eod_token_id sep_token_id decoder_start_token_id image_token_id
im_start_id im_end_id im_newline_id mask_init_id text_start_id text_end_id id2label label2id is_encoder_decoder
initializer_range initializer_factor use_cache return_dict output_attentions output_hidden_states use_bfloat16
output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux router_jitter_noise input_jitter_noise
norm_topk_prob routed_scaling_factor rms_norm_eps layer_norm_epsilon layer_norm_eps norm_eps norm_type
scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn attention_dropout hidden_dropout
attn_pdrop embd_pdrop resid_pdrop dropout summary_type summary_activation summary_first_dropout
summary_proj_to_labels summary_use_proj rope_theta rope_scaling rope_parameters rope_interleave
partial_rotary_factor original_max_position_embeddings initial_context_length n_ctx qk_head_dim swiglu_limit
pretraining_tp ep_size org_vocab_size pool_type _attn_implementation add_cross_attention
"""
HARMLESS: Final = frozenset(_HARMLESS_WORDS.split())
"""Fields that change neither sizes nor FLOP of training."""


class Fields:
    """A configuration being read; every error names the field as the file spells it.

    Attributes
    ----------
    findings : what was assumed, and what stands in the file and is not modelled
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self._read: set[str] = set()
        self.findings: list[Finding] = []

    def has(self, *names: str) -> bool:
        """Whether one of `names` is there and not null."""
        return any(self._data.get(name) is not None for name in names)

    def raw(self, *names: str) -> Any:
        """The first of `names` that is there and not null, else None."""
        self._read.update(names)
        return next((self._data[name] for name in names if self._data.get(name) is not None), None)

    def size(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """A whole number; frameworks have spelled some fields in several ways.

        Raises
        ------
        WorkloadError
            If it is missing and has no default, or is no size.
        """
        value = self.raw(*names)
        if value is None:
            if default is None:
                spellings = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
                raise WorkloadError(f"{names[0]}{spellings} is missing; expected a whole number")
            return default
        check_size(self._spelled(names), value, low)
        assert isinstance(value, int)
        return value

    def optional_size(self, *names: str) -> int | None:
        """A whole number, or None where it is missing or null."""
        return self.size(*names) if self.has(*names) else self.raw(*names)

    def layers(self, *names: str) -> int:
        """The number of layers."""
        count = self.size(*names)
        check_num_layers(count, self._spelled(names))
        return count

    def flag(self, *names: str, default: bool) -> bool:
        """True or false.

        Raises
        ------
        WorkloadError
            If it is anything else.
        """
        value = self.raw(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise WorkloadError(f"{self._spelled(names)} is {shown(value)}; expected true or false")
        return value

    def word(self, *names: str, default: str) -> str:
        """A text.

        Raises
        ------
        WorkloadError
            If it is anything else.
        """
        value = self.raw(*names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise WorkloadError(f"{self._spelled(names)} is {shown(value)}; expected a text")
        return value

    def per_layer(self, num_layers: int, *names: str, default: int | None = None) -> tuple[int, ...]:
        """Sizes of every layer, from one for all or a list of one each.

        Raises
        ------
        WorkloadError
            If it is neither, or the list has another length.
        """
        value = self.raw(*names)
        if not isinstance(value, list):
            return (self.size(*names, default=default),) * num_layers
        if len(value) != num_layers:
            raise WorkloadError(
                f"{self._spelled(names)} has {len(value)} entries; expected one for each of {num_layers}"
            )
        for entry in value:
            check_size(self._spelled(names), entry)
        return tuple(value)

    def numbers(self, name: str) -> Sequence[int]:
        """A list of whole numbers from 0, empty where it is missing.

        Raises
        ------
        WorkloadError
            If it is anything else.
        """
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise WorkloadError(f"{name} is {shown(value)}; expected a list of whole numbers")
        for entry in value:
            check_size(name, entry, low=0)
        return value

    def assume(self, code: str, message: str) -> None:
        """Note a finding."""
        self.findings.append(Finding(code, message))

    def leftovers(self) -> None:
        """Note a finding for every field that nothing has read and that is not known to be harmless."""
        for name in sorted(set(self._data) - self._read - HARMLESS):
            if self._data[name] not in (None, False):
                self.assume(
                    "config_field_ignored",
                    f"{name} is {shown(self._data[name])} in the configuration and is not modelled; check whether it "
                    "changes sizes or work",
                )

    def _spelled(self, names: Sequence[str]) -> str:
        return next((name for name in names if self._data.get(name) is not None), names[0])

"""A recipe's search: what fits into memory as one micro-batch, by whole train steps on the longest rows."""

from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torchtune import utils

from torchtune_adaptive.batch.limits import halvings
from torchtune_adaptive.data import AdaptiveData, num_tokens
from torchtune_adaptive.expectation import expected_batch_size
from torchtune_adaptive.refuse import refuse_long_rows, refuse_packs
from torchtune_adaptive.search.find import search
from torchtune_adaptive.search.strategies import Probe, SearchResult
from torchtune_adaptive.search.throughput import smallest_near_best, tokens_per_second
from torchtune_adaptive.search.token_budget import largest_token_budget
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.report import AdaptiveReport, length_table, probe_table, rate_table, summary
from torchtune_adaptive.worst_case import Row, refuse_long_samples, stretched_row, window_maker, worst_case_row

log = utils.get_logger("DEBUG")


class AdaptiveSizing(AdaptiveData):
    """Finds out how large a micro-batch may be. The annotated attributes are the stock recipe's own."""

    _model: nn.Module
    _optimizer: torch.optim.Optimizer
    _tokenizer: Any
    activations_handling_ctx: Any

    _report: AdaptiveReport
    _result: SearchResult | None = None
    _fitting_rows: int | None = None  # to be used where more are asked for than fit
    _token_budget: int | None = None
    _probe_row: Row | None = None

    def _size(self, cfg: DictConfig) -> None:
        """Find the sizes that the config asks for. A collective."""
        settings = self._adaptive
        if settings.max_tokens_per_micro_batch is not None:
            refuse_packs(self._dataloader.dataset)
        if settings.searches:
            self._result = self._search(cfg)
            self._fitting_rows = self._result.batch_size
            if settings.objective == "throughput":
                self._fitting_rows = self._fastest(self._result)
        if isinstance(settings.max_tokens_per_micro_batch, int):
            self._token_budget = settings.max_tokens_per_micro_batch
            self._refuse_long_samples(self._token_budget)

    def _search(self, cfg: DictConfig) -> SearchResult:
        """The largest micro-batch that fits in rows, and if the config asks for it in tokens. A collective."""
        if self._largest_batch_size() == 0:
            self._refuse_small_data(1)
        self._probe_row, seq_len = self._worst_row()
        settings, most_rows = self._adaptive, self._most_rows_of_micro_batch()
        assert self._meter is not None
        result = self._searched(
            seq_len,
            settings,
            bound=min(most_rows, settings.max_batch_size or most_rows),
            start=cfg.batch_size,
            expected=expected_batch_size(
                cfg, seq_len=seq_len, settings=settings, meter=self._meter, consensus=self._consensus
            ),
        )
        self._report.result, self._report.seq_len = result, seq_len
        utils.log_rank_zero(log, f"Probes as rank 0 saw them:\n{probe_table(result)}\n{summary(result, seq_len)}")
        if settings.max_tokens_per_micro_batch == "auto":
            self._token_budget = self._report.token_budget = self._largest_token_budget(result, seq_len, most_rows)
        return result

    def _largest_token_budget(self, result: SearchResult, seq_len: int, most_rows: int) -> int:
        """The tokens of the largest micro-batch that fits, whatever rows make it up. A collective."""
        tried: list[tuple[int, Probe]] = []

        def largest_rows_at(length: int, bound: int) -> int:
            settings = replace(self._adaptive, strategy="decrease_until_oom", power_of_two=False)
            found = self._searched(length, settings, bound=bound, start=bound)
            tried.extend((length, probe) for probe in found.probes)
            return found.exact_batch_size

        budget = largest_token_budget(
            largest_rows_at,
            seq_len=seq_len,
            rows=result.exact_batch_size,
            forecast_rows=result.forecast_rows,
            max_rows=most_rows,
        )
        utils.log_rank_zero(log, f"Other lengths:\n{length_table(tried)}\ntoken budget: {budget} with padding")
        return budget

    def _searched(self, seq_len: int, settings: AdaptiveSettings, *, bound: int, **options: Any) -> SearchResult:
        """The search among up to ``bound`` rows of ``seq_len`` tokens. A collective."""
        assert self._meter is not None
        result = search(
            self._probe_step,
            lambda rows: self._probe_window(rows, seq_len),
            model=self._model,
            optimizer=self._optimizer,
            device=self._device,
            meter=self._meter,
            settings=settings,
            consensus=self._consensus,
            bound=bound,
            **options,
        )
        self._renew_offloading()
        return result

    def _fastest(self, result: SearchResult) -> int:
        """The smallest of the size found and its halvings that trains as fast as the best of them. A collective."""
        assert self._probe_row is not None
        seq_len = num_tokens(self._probe_row)
        rates = tokens_per_second(
            halvings(result.batch_size, above=0),
            self._probe_step,
            lambda rows: self._probe_window(rows, seq_len),
            lambda rows: rows * seq_len * len(self._probe_window(rows, seq_len)),
            model=self._model,
            optimizer=self._optimizer,
            device=self._device,
            consensus=self._consensus,
        )
        self._renew_offloading()
        fastest = smallest_near_best(rates)
        self._report.tokens_per_second = rates
        utils.log_rank_zero(log, f"Steps as in training, timed:\n{rate_table(rates, chosen=fastest)}")
        return fastest

    def _most_rows_of_micro_batch(self) -> int:
        """Rows of the largest micro-batch that training can ask for."""
        settings, largest = self._adaptive, self._largest_batch_size()
        is_found = settings.use_maximum_batch_size and not self._is_global
        if settings.batch_increase_function is None and not is_found:
            return self._rows_at(self._batch_size)
        if not self._is_global:
            return largest
        limit = settings.growth_limit if isinstance(settings.growth_limit, int) else largest
        return self._rows_at(max(self._batch_size, min(limit, largest)))

    def _probe_window(self, rows: int, seq_len: int) -> list[list[Row]]:
        """The micro-batches of a probe with ``rows`` rows of ``seq_len`` tokens."""
        assert self._probe_row is not None
        row = self._probe_row if seq_len == num_tokens(self._probe_row) else stretched_row(self._probe_row, seq_len)
        return window_maker(row, micro_batches=self._micro_steps_of_probe(rows))(rows)

    def _micro_steps_of_probe(self, rows: int) -> int:
        """Micro-steps that an optimizer step takes where ``rows`` rows are the largest micro-batch."""
        settings = self._adaptive
        if settings.max_tokens_per_micro_batch is not None or settings.growth_limit != "memory":
            return 2  # or more, which need no more memory
        return -(-self._rows_at(self._batch_size) // rows) if self._is_global else self._gradient_accumulation_steps

    def _worst_row(self) -> tuple[Row, int]:
        """The longest row that training can meet, and its tokens. A collective."""
        longest = getattr(self._tokenizer, "max_seq_len", None)
        row, seq_len = worst_case_row(
            self._dataloader.dataset,
            seq_len=self._adaptive.seq_len,
            tokenizer_max_seq_len=longest,
            consensus=self._consensus,
        )
        refuse_long_rows(seq_len, self._model)
        if longest is not None and seq_len < longest:
            utils.log_rank_zero(
                log, f"Rows may have {longest} tokens, but probes have {seq_len}: longer ones may not fit."
            )
        return row, seq_len

    def _refuse_long_samples(self, max_tokens: int) -> None:
        """Refuse samples above a token budget; they are read only if the tokenizer does not cut them. A collective."""
        longest = getattr(self._tokenizer, "max_seq_len", None)
        if longest is None or longest > max_tokens:
            refuse_long_samples(self._dataloader.dataset, max_tokens=max_tokens, consensus=self._consensus)

    def _probe_step(self, micro_batches: list[list[Row]]) -> None:
        """One optimizer step over ``micro_batches``."""
        self._renew_offloading()
        self._run_micro_batches(micro_batches)

    def _run_micro_batches(self, micro_batches: list[list[Row]]) -> Any:
        """One optimizer step over ``micro_batches``, come what may. A collective."""
        raise NotImplementedError

    def _renew_offloading(self) -> None:
        """Activation offloading keeps a step's tensors in its context, which a failed step leaves unusable."""
        self.activations_handling_ctx = type(self.activations_handling_ctx)()

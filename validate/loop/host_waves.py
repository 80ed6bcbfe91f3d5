"""Wave groups as a CPU runs them: the computing thread starts each group's collective, so no kernel waits on an SM."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from overlapsim.strategies.wave_group.groups import checked_groups, group_bytes
from overlapsim.strategies.wave_group.strategy import WaveGroup

from overlapsim.strategy.base import Context, Parameters
from overlapsim.strategy.tasks import Placement, Site
from overlapsim.units import ps_from_s


class HostWaveGroup(WaveGroup):
    """Same plan, parameters and kernel price as `wave_group`; only who waits for the counters differs.

    On a GPU a waiting kernel holds an SM from launch to signal. Here tiles are computed by the thread that starts the
    collectives: it knows when a group is whole, and nothing waits.
    """

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Put the kernel on one stream and a collective a group on the other, behind the group's tiles."""
        pair, prices, gpu = context.pair(), context.prices, site.gpu()
        kernel = prices.kernel_gemm(pair.gemm, self.name, tuple(parameters["tile"]))
        groups = checked_groups(parameters, kernel)
        source = gpu.add_gemm(pair.gemm, kernel)
        wait_ps = ps_from_s(prices.signal_wait_s)
        sizes = group_bytes(pair.gemm, kernel, parameters["swizzle"], groups)
        flows = []
        for number, (done, size) in enumerate(zip(np.cumsum(groups), sizes, strict=True), start=1):
            part = replace(pair.collective, size_bytes=float(size))
            sms = prices.comm_sms(part.kind)
            flows.append(gpu.add_collective(part, sms=sms, tag=f"group {number}/{len(groups)}"))
            site.builder.add_edge(source, flows[-1], src_units=int(done), lag_ps=wait_ps)
        return pair.placement(((source,), (source,)), ((flows[0],), (flows[-1],)))


HOST_WAVE_GROUP = HostWaveGroup()

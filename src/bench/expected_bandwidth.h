#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace octet {

/// A bus bandwidth that others, or we, measured on such a machine.
struct ExpectedBandwidth {
  double bus_gb_s = 0.0;  ///< 10^9 bytes a second
  std::string source;
};

/// What `ranks` GPUs named `device`, all of one node, should reach in `operation` (all_reduce, all_gather,
/// reduce_scatter, all_to_all, send_receive) with messages of `bytes`. Nothing where no figure is
/// known: other machines, other numbers of ranks, small messages.
std::optional<ExpectedBandwidth> expected_bandwidth(const std::string& device, int ranks,
                                                    const std::string& operation, std::int64_t bytes);

}  // namespace octet

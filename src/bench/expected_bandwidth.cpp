#include "expected_bandwidth.h"

#include <string_view>

namespace octet {

namespace {

enum class Board { kA100, kH100, kH200 };

/// The modules that boards with NVLink between all GPUs carry. PCIe cards (also NVL, in pairs) and Grace
/// Hopper are none.
std::optional<Board> board_of(std::string_view device) {
  const auto has = [device](std::string_view part) { return device.find(part) != std::string_view::npos; };
  if (has("PCIe") || has("NVL") || has("GH200")) return {};
  if (has("H200")) return Board::kH200;
  if (has("H100")) return Board::kH100;
  if (has("A100-SXM")) return Board::kA100;
  return {};
}

struct Row {
  Board board;
  int ranks;
  const char* operation;
  std::int64_t from_bytes;  ///< smallest message that it holds for
  double bus_gb_s;
  const char* source;
};

constexpr std::int64_t kMiB = 1 << 20, kGiB = 1 << 30;
constexpr const char* kTwo = "measured on two H200 SXM (NV18, no NVLS), NCCL 2.28";
constexpr const char* kFour = "measured on four H200 SXM (NV18, no NVLS), NCCL 2.28";
constexpr const char* kEight = "eight H200, ring: stas00/ml-engineering, network/README.md";
constexpr const char* kEightH100 = "eight H100, ring: nccl-tests#212, nccl#1047, nccl#1281";
constexpr const char* kEightA100 = "eight A100 at 1 GB: nccl-tests#175, nccl#1712, nccl-tests#149";

/// Rings, which need no NVLS. Of rows that fit, the one with the largest from_bytes counts.
constexpr Row kRows[] = {
    {Board::kH200, 2, "all_reduce", 16 * kMiB, 218, kTwo},
    {Board::kH200, 2, "all_gather", 16 * kMiB, 158, kTwo},
    {Board::kH200, 2, "reduce_scatter", 16 * kMiB, 167, kTwo},
    {Board::kH200, 2, "send_receive", 16 * kMiB, 300, kTwo},
    {Board::kH200, 2, "all_reduce", kGiB, 330, kTwo},
    {Board::kH200, 2, "all_gather", kGiB, 268, kTwo},
    {Board::kH200, 2, "reduce_scatter", kGiB, 264, kTwo},
    {Board::kH200, 2, "send_receive", kGiB, 369, kTwo},
    {Board::kH200, 2, "all_to_all", 436 * kMiB, 293, kTwo},
    {Board::kH200, 4, "all_reduce", 16 * kMiB, 259, kFour},
    {Board::kH200, 4, "all_gather", 16 * kMiB, 195, kFour},
    {Board::kH200, 4, "reduce_scatter", 16 * kMiB, 223, kFour},
    {Board::kH200, 4, "all_reduce", kGiB, 356, kFour},
    {Board::kH200, 4, "all_gather", kGiB, 326, kFour},
    {Board::kH200, 4, "reduce_scatter", kGiB, 327, kFour},
    {Board::kH200, 4, "send_receive", kGiB, 360, kFour},
    {Board::kH200, 8, "all_reduce", kGiB, 367, kEight},
    {Board::kH200, 8, "all_gather", kGiB, 361, kEight},
    {Board::kH200, 8, "reduce_scatter", kGiB, 363, kEight},
    {Board::kH100, 8, "all_reduce", kGiB, 370, kEightH100},
    {Board::kH100, 8, "all_gather", kGiB, 350, kEightH100},
    {Board::kH100, 8, "reduce_scatter", 512 * kMiB, 341, kEightH100},
    {Board::kH100, 8, "reduce_scatter", kGiB, 349, kEightH100},
    {Board::kA100, 8, "all_reduce", kGiB, 200, kEightA100},
};

}  // namespace

std::optional<ExpectedBandwidth> expected_bandwidth(const std::string& device, int ranks,
                                                    const std::string& operation, std::int64_t bytes) {
  const std::optional<Board> board = board_of(device);
  const Row* best = nullptr;
  for (const Row& row : kRows) {
    if (row.board != board || row.ranks != ranks || operation != row.operation) continue;
    if (row.from_bytes <= bytes && (best == nullptr || row.from_bytes > best->from_bytes)) best = &row;
  }
  if (best == nullptr) return {};
  return ExpectedBandwidth{best->bus_gb_s, best->source};
}

}  // namespace octet

#include <algorithm>
#include <array>
#include <cmath>

#include "expected_bandwidth.h"
#include "message_pattern.h"
#include "octet/base/error.h"
#include "octet/bench/operands.h"
#include "octet/bench/session.h"
#include "octet/runtime/grid.h"

namespace octet {

namespace {

constexpr std::int64_t kSmallestBytes = 64 << 10;
constexpr std::int64_t kSizeFactor = 16;
constexpr double kWarnBelow = 0.85;

/// One axis of the layout. All its lines are measured at once, as they work in training.
struct Axis {
  std::string name;
  std::unique_ptr<Communicator> ranks;
  bool one_node = false;
};

std::vector<Axis> axes_of(const BenchSession& session, const Grid& grid) {
  std::vector<Axis> axes;
  const auto add = [&](const char* name, MPI_Comm ranks, bool wanted) {
    int size = 1, result = MPI_UNEQUAL;
    MPI_Comm_size(ranks, &size);
    if (size == 1 || !wanted) return;
    MPI_Comm node = MPI_COMM_NULL;
    MPI_Comm_split_type(ranks, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
    MPI_Comm_compare(ranks, node, &result);
    MPI_Comm_free(&node);
    const bool one_node = session.everywhere(result == MPI_CONGRUENT || result == MPI_SIMILAR);
    axes.push_back({name, session.backend.make_communicator(ranks, name), one_node});
  };
  add("tensor", grid.tensor(), true);
  add("context", grid.context(), true);
  add("data", grid.shards(), true);
  add("data (copies)", grid.copies(), true);
  add("pipeline", grid.pipeline(), true);
  const bool covered = std::any_of(
      axes.begin(), axes.end(), [&](const Axis& axis) { return axis.ranks->size() == session.world.size(); });
  add("world", session.world.ranks(), !covered);
  return axes;
}

/// One operation on one axis: how to run it, and what it must give.
struct Operation {
  const char* name;
  double bus_factor;  ///< bus bytes of a message byte, as nccl-tests counts them
  std::function<void()> prepare, run;
  std::function<bool()> correct;
};

class AxisBench {
 public:
  AxisBench(BenchSession& session, Axis& axis, DType type, std::int64_t bytes)
      : session_(session),
        ranks_(*axis.ranks),
        pattern_(session.device, session.stream, ranks_.size(), type),
        memory_(session.device, session.stream, 0, type) {
    const std::int64_t unit = ranks_.size();
    part_ = std::max<std::int64_t>(1, bytes / size_of(type) / unit);
    in_ = memory_.zeros(type, 1, part_ * unit);
    out_ = memory_.zeros(type, 1, part_ * unit);
  }

  std::int64_t bytes() const { return in_.bytes(); }

  std::vector<Operation> operations() {
    const double n = ranks_.size(), others = (n - 1) / n;
    const int own = ranks_.rank();
    const Tensor out_part = out_.range(own * part_, part_);
    Stream& stream = session_.stream;
    const auto fill_in = [this, own] { pattern_.fill(in_, own, 0); };
    return {
        {"all_reduce", 2 * others, fill_in,
         [this, &stream] { ranks_.all_reduce(stream, in_, ReduceOp::kSum); },
         [this] { return pattern_.is_sum(in_, 0); }},
        {"all_gather", others, fill_in,
         [this, &stream] { ranks_.all_gather(stream, in_.range(0, part_), out_); },
         [this] { return each_part([&](Tensor part, int rank) { return pattern_.is(part, rank, 0); }); }},
        {"reduce_scatter", others, fill_in,
         [this, &stream, out_part] { ranks_.reduce_scatter(stream, in_, out_part); },
         [this, own, out_part] { return pattern_.is_sum(out_part, own * part_); }},
        {"all_to_all", others, fill_in, [this, &stream] { ranks_.all_to_all(stream, in_, out_); },
         [this, own] {
           return each_part([&](Tensor part, int rank) { return pattern_.is(part, rank, own * part_); });
         }},
        {"send_receive", 1.0, fill_in, [this] { exchange(); },
         [this, own] { return !receives_first() || pattern_.is(out_, own - 1, 0); }},
    };
  }

  void clear() {
    session_.device.zero(session_.stream, in_.data, in_.bytes());
    session_.device.zero(session_.stream, out_.data, out_.bytes());
    session_.stream.synchronize();
    turn_ = 0;
  }

 private:
  bool each_part(const std::function<bool(Tensor part, int rank)>& check) const {
    bool good = true;
    for (int rank = 0; rank < ranks_.size(); ++rank)
      good = check(out_.range(rank * part_, part_), rank) && good;
    return good;
  }
  bool receives_first() const { return ranks_.rank() % 2 == 1; }
  /// One message between neighbours 0 and 1, 2 and 3, …; every second one goes back.
  void exchange() {
    const int own = ranks_.rank(), peer = own % 2 == 0 ? own + 1 : own - 1;
    const bool receives = receives_first() == (turn_++ % 2 == 0);
    if (peer == ranks_.size()) return;
    if (receives) {
      ranks_.receive(session_.stream, out_, peer);
    } else {
      ranks_.send(session_.stream, in_, peer);
    }
  }

  BenchSession& session_;
  Communicator& ranks_;
  MessagePattern pattern_;
  Operands memory_;
  std::int64_t part_ = 0;  ///< elements of a rank's part
  int turn_ = 0;           ///< messages exchanged
  Tensor in_, out_;
};

std::vector<std::int64_t> sizes_up_to(std::int64_t most) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t bytes = std::min(kSmallestBytes, most); bytes < most; bytes *= kSizeFactor)
    sizes.push_back(bytes);
  sizes.push_back(most);
  return sizes;
}

void measure(BenchSession& session, Axis& axis, DType type, std::int64_t wanted, PartResult& result) {
  AxisBench bench(session, axis, type, wanted);
  Stopwatch stopwatch = session.stopwatch();
  for (const Operation& operation : bench.operations()) {
    bench.clear();
    operation.prepare();
    operation.run();
    session.stream.synchronize();
    const bool correct = session.everywhere(operation.correct());
    bench.clear();  // sums of zeros stay finite, however often they are taken
    const Timing timing = stopwatch.time(operation.run);
    const double algorithm = static_cast<double>(bench.bytes()) / timing.ms / 1e6;
    const double bus = algorithm * operation.bus_factor;
    nlohmann::json row = {{"axis", axis.name},           {"ranks", axis.ranks->size()},
                          {"operation", operation.name}, {"type", name_of(type)},
                          {"bytes", bench.bytes()},      {"time_us", timing.ms * 1e3},
                          {"algorithm_gb_s", algorithm}, {"bus_gb_s", bus},
                          {"correct", correct}};
    std::optional<ExpectedBandwidth> expected;
    if (axis.one_node && !session.shared_device && session.device.kind() == DeviceKind::kCuda) {
      expected = expected_bandwidth(session.device.name(), axis.ranks->size(), operation.name, bench.bytes());
    }
    if (expected) {
      row["expected_gb_s"] = expected->bus_gb_s;
      row["percent"] = 100 * bus / expected->bus_gb_s;
      if (bus < kWarnBelow * expected->bus_gb_s) {
        result.warnings.push_back(
            fmt::format("{} {} of {} bytes ({}): {:.1f} GB/s is {:.0f} % of the {:.0f} GB/s expected ({})",
                        axis.name, operation.name, bench.bytes(), name_of(type), bus,
                        100 * bus / expected->bus_gb_s, expected->bus_gb_s, expected->source));
      }
      const std::string note = "expected: " + expected->source;
      if (std::find(result.notes.begin(), result.notes.end(), note) == result.notes.end())
        result.notes.push_back(note);
    }
    result.table.add(std::move(row));
  }
}

}  // namespace

PartResult bench_comm(BenchSession& session) {
  PartResult result{"collectives and messages over each axis of the layout",
                    ResultTable({{"axis", "axis"},
                                 {"ranks", "ranks"},
                                 {"operation", "operation"},
                                 {"type", "type"},
                                 {"bytes", "bytes"},
                                 {"time_us", "time us"},
                                 {"algorithm_gb_s", "algorithm GB/s", 2},
                                 {"bus_gb_s", "bus GB/s", 2},
                                 {"expected_gb_s", "expected GB/s", 0},
                                 {"percent", "% of expected", 0},
                                 {"correct", "correct"}}),
                    {},
                    {}};
  const Deck::Parallel& parallel = session.deck.parallel;
  const Grid grid(session.world.ranks(),
                  {static_cast<int>(parallel.tensor), static_cast<int>(parallel.context),
                   static_cast<int>(parallel.data), static_cast<int>(parallel.pipeline)},
                  static_cast<int>(parallel.shard_size));
  std::vector<Axis> axes = axes_of(session, grid);
  if (axes.empty()) result.notes.push_back("one rank: there is nobody to exchange with");
  std::vector<DType> types{session.compute()};
  if (types.front() != DType::kF32) types.push_back(DType::kF32);
  for (Axis& axis : axes) {
    if (axis.ranks->size() == session.world.size() && axis.name != "world")
      result.notes.push_back(fmt::format("the {} axis is the whole world", axis.name));
    for (const DType type : types) {
      for (const std::int64_t bytes : sizes_up_to(session.limits.max_bytes))
        measure(session, axis, type, bytes, result);
    }
  }
  result.notes.push_back(
      "bytes as nccl-tests counts them: the whole of what a rank has before or after; bus GB/s are algorithm "
      "GB/s times 2(n-1)/n for all_reduce, (n-1)/n for the other collectives, 1 for send_receive, whose "
      "messages go one way at a time; the time is of the slowest rank, all lines of an axis at work");
  return result;
}

}  // namespace octet

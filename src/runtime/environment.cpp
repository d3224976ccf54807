#include "octet/runtime/environment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <sstream>
#include <string_view>

#include "octet/runtime/report_text.h"

namespace octet {
namespace {

bool starts_with_any(std::string_view name, std::initializer_list<std::string_view> prefixes) {
  return std::ranges::any_of(prefixes, [&](std::string_view prefix) { return name.starts_with(prefix); });
}

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, name) != names.end();
}

/// What mpirun of Open MPI 4 sets for the processes it starts, or a process without a launcher for itself.
/// Options of mpirun's own, such as --bind-to, show in what they do.
bool set_by_launcher(std::string_view name) {
  return starts_with_any(name, {"OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_plm", "OMPI_MCA_rmaps_",
                                "OMPI_MCA_shmem_RUNTIME", "OMPI_MCA_initial_wdir"}) ||
         is_one_of(name,
                   {"OMPI_MCA_pmix", "OMPI_MCA_mpi_oversubscribe", "OMPI_MCA_hwloc_base_binding_policy"});
}

bool steers(std::string_view name, std::string_view value) {
  if (set_by_launcher(name)) return false;
  // World gives this to itself.
  if (name == "OMPI_MCA_mpi_yield_when_idle" && value == "1") return false;
  // Folders and versions of an installation.
  if (is_one_of(name, {"CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_DIR", "CUDA_VERSION", "NCCL_VERSION",
                       "NCCL_ROOT", "NCCL_HOME", "CUDNN_ROOT", "CUDNN_VERSION", "CUDNN_HOME"}))
    return false;
  return starts_with_any(name, {"NCCL_", "OMPI_MCA_", "UCX_", "CUDA_", "CUDNN_", "CUBLAS", "NVIDIA_TF32"});
}

struct DebuggingVariable {
  std::string_view name, cost;
};
constexpr std::array kDebugging = {
    DebuggingVariable{"NCCL_DEBUG", "every rank writes much; WARN writes trouble only"},
    DebuggingVariable{"NCCL_P2P_DISABLE",
                      "GPUs of a node exchange data through host memory, not over NVLink"},
    DebuggingVariable{"NCCL_P2P_LEVEL", "NCCL may not choose which GPUs reach one another directly"},
    DebuggingVariable{"NCCL_SHM_DISABLE", "GPUs without peer access exchange data through the network"},
    DebuggingVariable{"NCCL_IB_DISABLE", "nodes exchange data through TCP, not InfiniBand or RoCE"},
    DebuggingVariable{"NCCL_NET_GDR_LEVEL",
                      "NCCL may not choose when network cards read GPU memory directly"},
    DebuggingVariable{"NCCL_ALGO", "NCCL may not choose the algorithm by size; some collectives may fail"},
    DebuggingVariable{"NCCL_PROTO", "NCCL may not choose the protocol by size; some choices are unsafe"},
    DebuggingVariable{"NCCL_MIN_NCHANNELS", "collectives take more of the GPU from computation"},
    DebuggingVariable{"NCCL_MAX_NCHANNELS",
                      "all communicators are limited; parallel.nccl_max_ctas limits some"},
    DebuggingVariable{"NCCL_MIN_CTAS", "collectives take more of the GPU from computation"},
    DebuggingVariable{"NCCL_MAX_CTAS", "all communicators are limited; parallel.nccl_max_ctas limits some"},
    DebuggingVariable{"NCCL_NTHREADS", "NCCL may not choose its threads"},
    DebuggingVariable{"NCCL_BUFFSIZE", "NCCL may not choose its buffers"},
    DebuggingVariable{"NCCL_COMM_BLOCKING", "overrides how octet waits for NCCL"},
    DebuggingVariable{"NCCL_CHECK_POINTERS", "every collective checks its pointers"},
    DebuggingVariable{"NCCL_LAUNCH_MODE", "for debugging NCCL's launches only"},
    DebuggingVariable{"CUDA_LAUNCH_BLOCKING", "the host waits for every kernel: nothing overlaps"},
    DebuggingVariable{"CUDA_DEVICE_MAX_CONNECTIONS",
                      "one queue to the GPU: copies, collectives and kernels overlap less"},
    DebuggingVariable{"CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
                      "kernels are slower, and a failure writes large files"},
    DebuggingVariable{"CUDNN_LOGLEVEL_DBG", "cuDNN writes every call"},
    DebuggingVariable{"CUDNN_LOGINFO_DBG", "cuDNN writes every call"},
    DebuggingVariable{"CUBLAS_LOGINFO_DBG", "cuBLAS writes every call"},
    DebuggingVariable{"CUBLASLT_LOG_LEVEL", "cuBLASLt writes its calls"},
    DebuggingVariable{"NVIDIA_TF32_OVERRIDE", "precision of float32 products is not what the deck says"},
};

/// Empty where the variable is no matter of debugging, or its value turns it off.
std::string cost_of(std::string_view name, std::string_view value) {
  const auto* found = std::ranges::find(kDebugging, name, &DebuggingVariable::name);
  if (found == kDebugging.end() || value.empty()) return "";
  if (name == "NCCL_DEBUG" && is_one_of(value, {"WARN", "VERSION", "warn", "version"})) return "";
  if (name == "CUDA_DEVICE_MAX_CONNECTIONS" && value != "1") return "";
  // Zero sets these, and turns all others off.
  const bool zero_counts = is_one_of(name, {"NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL", "NVIDIA_TF32_OVERRIDE"});
  return value == "0" && !zero_counts ? "" : std::string(found->cost);
}

std::string value_of(const std::vector<EnvironmentVariable>& environment, const std::string& name) {
  const auto found = std::ranges::find(environment, name, &EnvironmentVariable::name);
  return found == environment.end() ? "not set" : found->value.empty() ? "empty" : found->value;
}

}  // namespace

std::vector<EnvironmentVariable> steering_variables(const std::vector<std::string>& entries) {
  std::vector<EnvironmentVariable> variables;
  for (const std::string& entry : entries) {
    const std::size_t equals = entry.find('=');
    if (equals == std::string::npos) continue;
    const std::string name = entry.substr(0, equals), value = entry.substr(equals + 1);
    if (steers(name, value)) variables.push_back({name, value, cost_of(name, value)});
  }
  std::ranges::sort(variables, {}, &EnvironmentVariable::name);
  return variables;
}

std::string environment_report(const std::vector<std::vector<EnvironmentVariable>>& environments) {
  std::vector<std::string> lines, settings;
  std::map<std::string, std::string> costs;
  std::set<std::string> names;
  for (const auto& environment : environments) {
    for (const EnvironmentVariable& variable : environment) {
      names.insert(variable.name);
      if (!variable.cost.empty()) costs.emplace(variable.name + "=" + variable.value, variable.cost);
    }
  }
  for (const EnvironmentVariable& variable : environments.front())
    settings.push_back(variable.name + "=" + variable.value);
  if (!settings.empty()) lines.push_back(wrapped("  environment ", settings));
  for (const auto& [setting, cost] : costs) lines.push_back(fmt::format("warning: {}: {}", setting, cost));
  for (const std::string& name : names) {
    if (name == "CUDA_VISIBLE_DEVICES") continue;
    std::map<std::string, std::vector<int>> holders;
    for (std::size_t rank = 0; rank < environments.size(); ++rank)
      holders[value_of(environments[rank], name)].push_back(static_cast<int>(rank));
    if (holders.size() < 2) continue;
    std::vector<std::string> parts;
    for (const auto& [value, ranks] : holders)
      parts.push_back(fmt::format("{} on {}", value, ranks_text(ranks)));
    lines.push_back(fmt::format("warning: ranks differ in {}: {}", name, fmt::join(parts, "; ")));
  }
  return fmt::format("{}", fmt::join(lines, "\n"));
}

std::string describe_environment(const World& world) {
  std::vector<std::string> own;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    own.emplace_back(*entry);
    std::ranges::replace(own.back(), '\n', ' ');
  }
  std::string text;
  for (const EnvironmentVariable& variable : steering_variables(own))
    text += variable.name + "=" + variable.value + "\n";
  std::vector<std::vector<EnvironmentVariable>> environments;
  for (const std::string& lines : world.gather(text)) {
    std::istringstream stream(lines);
    std::vector<std::string> entries;
    for (std::string line; std::getline(stream, line);) entries.push_back(line);
    environments.push_back(steering_variables(entries));
  }
  return environment_report(environments);
}

}  // namespace octet

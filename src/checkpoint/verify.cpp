#include "manifest.h"
#include "octet/base/error.h"
#include "octet/checkpoint/checkpoint.h"
#include "shard_file.h"

namespace octet {

std::vector<std::string> verify_checkpoint(const CheckpointInfo& info) {
  std::vector<std::string> problems;
  std::map<std::string, std::vector<const CheckpointInfo::Part*>> by_file;
  for (const auto& [name, tensor] : info.tensors) {
    if (const auto problem = checkpoint::coverage_problem(name, tensor)) problems.push_back(*problem);
    for (const CheckpointInfo::Part& part : tensor.parts) by_file[part.file].push_back(&part);
  }
  for (const CheckpointInfo::File& file : info.files) {
    try {
      checkpoint::check_hash(info, file);
      if (const auto label = checkpoint::expected_label(info, file.name))
        checkpoint::dataset_offsets(info.path / file.name, *label, by_file[file.name]);
    } catch (const Error& error) {
      problems.push_back(error.what());
    }
  }
  return problems;
}

}  // namespace octet

#include "manifest.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "files.h"
#include "octet/base/error.h"

namespace octet::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "octet-checkpoint";
constexpr int kNewestVersion = 1;
constexpr const char* kHashKey = "manifest_xxh3_128";

/// Text of a JSON value; bytes that are not UTF-8 (a path in the deck) become U+FFFD instead of an exception.
std::string dump(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

Json json_of(const CheckpointInfo::TensorInfo& tensor) {
  Json boxes = Json::array();
  for (const CheckpointInfo::Part& part : tensor.parts)
    boxes.push_back({{"file", part.file},
                     {"dataset", part.dataset},
                     {"offset", {part.box.row, part.box.col}},
                     {"extent", {part.box.rows, part.box.cols}}});
  return {{"shape", {tensor.rows, tensor.cols}}, {"boxes", boxes}};
}

CheckpointInfo::TensorInfo tensor_of(const Json& json) {
  CheckpointInfo::TensorInfo tensor;
  tensor.rows = json.at("shape").at(0);
  tensor.cols = json.at("shape").at(1);
  for (const Json& box : json.at("boxes"))
    tensor.parts.push_back(
        {box.at("file"),
         box.at("dataset"),
         {box.at("offset").at(0), box.at("offset").at(1), box.at("extent").at(0), box.at("extent").at(1)}});
  return tensor;
}

void check_version(const std::filesystem::path& path, const Json& json) {
  if (!json.is_object() || json.value("format", Json()) != kFormat)
    fail(ErrorKind::kCheckpoint, "{} is not the manifest of an octet checkpoint (format is not \"{}\")",
         path.string(), kFormat);
  const Json version = json.value("version", Json());
  if (!version.is_number_integer() || version < 1)
    fail(ErrorKind::kCheckpoint, "{}: format version {} is unknown, this program reads 1 to {}",
         path.string(), dump(version), kNewestVersion);
  if (version > kNewestVersion)
    fail(ErrorKind::kCheckpoint,
         "{} was written by a newer octet (format {}, this program reads up to {}): upgrade octet",
         path.string(), dump(version), kNewestVersion);
}

/// Checks and takes out the manifest's own hash.
void check_own_hash(const std::filesystem::path& path, Json& json) {
  const std::string recorded = json.at(kHashKey);
  json.erase(kHashKey);
  const std::string found = hash_of_text(dump(json));
  if (found != recorded)
    fail(ErrorKind::kCheckpoint, "{} is damaged: XXH3-128 of its contents is {}, it says {}", path.string(),
         found, recorded);
}

CheckpointInfo info_of(const Json& json) {
  CheckpointInfo info;
  info.format = json.at("version");
  info.identity = json.at("identity");
  info.state.program = json.at("program");
  info.state.step = json.at("step");
  info.state.samples = json.at("samples");
  info.state.tokens = json.at("tokens");
  info.state.updates = json.at("updates");
  info.state.layout = json.at("layout");
  info.state.train_hash = json.at("train_hash");
  for (const auto& [key, value] : json.at("deck").items()) info.state.deck.emplace_back(key, value);
  for (const Json& file : json.at("files"))
    info.files.push_back({file.at("name"), file.at("bytes"), file.at("xxh3_128")});
  for (const auto& [name, tensor] : json.at("tensors").items()) info.tensors[name] = tensor_of(tensor);
  return info;
}

}  // namespace

std::string manifest_text(const CheckpointInfo& info) {
  const CheckpointState& state = info.state;
  Json json = {{"format", kFormat},        {"version", kNewestVersion},
               {"program", state.program}, {"identity", info.identity},
               {"step", state.step},       {"samples", state.samples},
               {"tokens", state.tokens},   {"updates", state.updates},
               {"layout", state.layout},   {"train_hash", state.train_hash},
               {"deck", Json::object()},   {"files", Json::array()},
               {"tensors", Json::object()}};
  for (const auto& [key, value] : state.deck) json["deck"][key] = value;
  for (const CheckpointInfo::File& file : info.files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}, {"xxh3_128", file.xxh3_128}});
  for (const auto& [name, tensor] : info.tensors) json["tensors"][name] = json_of(tensor);
  json[kHashKey] = hash_of_text(dump(json));
  return dump(json, 1) + "\n";
}

CheckpointInfo parse_manifest(const std::filesystem::path& path, const std::string& text) {
  try {
    Json json = Json::parse(text);
    check_version(path, json);
    check_own_hash(path, json);
    return info_of(json);
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::kCheckpoint, "{} is damaged: {}", path.string(), error.what());
  }
}

std::optional<std::string> coverage_problem(const std::string& name,
                                            const CheckpointInfo::TensorInfo& tensor) {
  std::vector<Box> boxes;
  std::int64_t elements = 0;
  for (const CheckpointInfo::Part& part : tensor.parts) {
    const Box& box = part.box;
    if (box.size() <= 0 || intersect(box, {0, 0, tensor.rows, tensor.cols}) != box)
      return fmt::format("tensor {} of shape [{}, {}] has a box outside it: offset [{}, {}], extent [{}, {}]",
                         name, tensor.rows, tensor.cols, box.row, box.col, box.rows, box.cols);
    boxes.push_back(box);
    elements += box.size();
  }
  std::sort(boxes.begin(), boxes.end(),
            [](const Box& a, const Box& b) { return std::pair(a.row, a.col) < std::pair(b.row, b.col); });
  for (std::size_t i = 0; i < boxes.size(); ++i)
    for (std::size_t j = i + 1; j < boxes.size() && boxes[j].row < boxes[i].row + boxes[i].rows; ++j)
      if (const std::optional<Box> common = intersect(boxes[i], boxes[j]))
        return fmt::format("tensor {} has elements in two boxes, from offset [{}, {}], extent [{}, {}]", name,
                           common->row, common->col, common->rows, common->cols);
  if (elements != tensor.rows * tensor.cols)
    return fmt::format("the boxes of tensor {} hold {} elements, its shape [{}, {}] has {}", name, elements,
                       tensor.rows, tensor.cols, tensor.rows * tensor.cols);
  return std::nullopt;
}

}  // namespace octet::checkpoint

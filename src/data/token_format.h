#pragma once

/// Names of version 1 of the token file, shared by its reader and writer.
namespace octet::token_format {

inline constexpr const char* kFormat = "octet-tokens";
inline constexpr int kVersion = 1;

inline constexpr const char* kTokens = "tokens";
inline constexpr const char* kDocuments = "documents";
inline constexpr const char* kLossMask = "loss_mask";

inline constexpr const char* kFormatAttribute = "format";
inline constexpr const char* kVersionAttribute = "version";
inline constexpr const char* kComplete = "complete";
inline constexpr const char* kVocabulary = "vocabulary";
inline constexpr const char* kEndOfDocument = "end_of_document";
inline constexpr const char* kTokenCount = "token_count";
inline constexpr const char* kDocumentCount = "document_count";
inline constexpr const char* kTokenizer = "tokenizer";
inline constexpr const char* kTokenizerHash = "tokenizer_hash";
inline constexpr const char* kSource = "source";
inline constexpr const char* kCommandLine = "command_line";
inline constexpr const char* kTokensHash = "tokens_xxh3_64";

}  // namespace octet::token_format

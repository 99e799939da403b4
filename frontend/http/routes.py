"""The routing table: every path of this server, with its handler and its access rule."""

from collections.abc import Awaitable, Callable

import msgspec

from frontend.http.anthropic import messages
from frontend.http.anthropic.messages_bodies import CountBody, MessagesBody
from frontend.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from frontend.http.llama_cpp import llama_cpp
from frontend.http.llama_cpp.llama_cpp_bodies import InfillBody, LlamaCppBody
from frontend.http.ollama import ollama
from frontend.http.ollama.ollama_bodies import OllamaChatBody, OllamaGenerateBody
from frontend.http.openai import chat, completions, embeddings, scores
from frontend.http.openai.responses_bodies import ResponsesBody
from frontend.http.pages import health, load, metrics, models, openapi, page, sessions
from frontend.http.replies.reply import Reply
from frontend.http.request import Request, Response, WrittenAnswer
from frontend.http.route import Access, Route
from frontend.http.service import Service
from frontend.http.stored import batch_pages, conversation_pages, file_pages, responses

_Handler = Callable[[Service, Request], Awaitable[Response | Reply | WrittenAnswer]]
_Row = tuple[str, str, _Handler, type[msgspec.Struct] | None]
_OLLAMA: tuple[_Row, ...] = (
    ("POST", "/api/chat", ollama.chat, OllamaChatBody),
    ("POST", "/api/generate", ollama.generate, OllamaGenerateBody),
    ("POST", "/api/embed", embeddings.embed, embeddings.OllamaEmbedBody),
    ("POST", "/api/embeddings", embeddings.embed_one, embeddings.OllamaOldBody),
    ("GET", "/api/tags", ollama.list_tags, None),
    ("GET", "/api/ps", ollama.list_running, None),
    ("POST", "/api/show", ollama.show, None),
    ("GET", "/api/version", ollama.get_version, None),
    ("POST", "/api/pull", ollama.pull, None),
    *(("POST", f"/api/{name}", ollama.refuse, None) for name in ("push", "create", "copy")),
    ("DELETE", "/api/delete", ollama.refuse, None),
)
_LLAMA_CPP: tuple[_Row, ...] = (
    *(("POST", path, llama_cpp.create_completion, LlamaCppBody) for path in ("/completion", "/completions")),
    ("POST", "/infill", llama_cpp.infill, InfillBody),
    ("POST", "/apply-template", llama_cpp.apply_template, ChatBody),
    ("GET", "/props", llama_cpp.get_props, None),
    ("POST", "/props", llama_cpp.refuse_props, None),
    ("GET", "/slots", llama_cpp.get_slots, None),
)
_CONVERSATIONS = tuple(
    Route(method, f"/v1/conversations{path}", handler, body=body, is_of_server=True)
    for method, path, handler, body in (
        ("POST", "", conversation_pages.create_conversation, conversation_pages.ConversationBody),
        ("GET", "/{name}", conversation_pages.get_conversation, None),
        ("POST", "/{name}", conversation_pages.update_conversation, conversation_pages.ConversationBody),
        ("DELETE", "/{name}", conversation_pages.delete_conversation, None),
        ("GET", "/{name}/items", conversation_pages.list_items, None),
        ("POST", "/{name}/items", conversation_pages.create_items, conversation_pages.ItemsBody),
        ("GET", "/{name}/items/{item}", conversation_pages.get_item, None),
        ("DELETE", "/{name}/items/{item}", conversation_pages.delete_item, None),
    )
)

ROUTES = (
    Route("POST", "/v1/chat/completions", chat.create_chat_completion, body=ChatBody),
    Route("POST", "/v1/completions", completions.create_completion, body=CompletionBody),
    Route("POST", "/v1/responses", responses.create_response, body=ResponsesBody),
    Route("GET", "/v1/responses/{name}", responses.get_response, is_of_server=True),
    Route("DELETE", "/v1/responses/{name}", responses.delete_response, is_of_server=True),
    Route("GET", "/v1/responses/{name}/input_items", responses.list_input_items, is_of_server=True),
    Route("POST", "/v1/responses/{name}/cancel", responses.cancel_response, is_of_server=True),
    *_CONVERSATIONS,
    Route("POST", "/v1/files", file_pages.create_file, is_of_server=True, is_upload=True),
    Route("GET", "/v1/files", file_pages.list_files, is_of_server=True),
    Route("GET", "/v1/files/{name}", file_pages.get_file, is_of_server=True),
    Route("DELETE", "/v1/files/{name}", file_pages.delete_file, is_of_server=True),
    Route("GET", "/v1/files/{name}/content", file_pages.get_content, is_of_server=True),
    Route("POST", "/v1/batches", batch_pages.create_batch, body=batch_pages.BatchBody, is_of_server=True),
    Route("GET", "/v1/batches", batch_pages.list_batches, is_of_server=True),
    Route("GET", "/v1/batches/{name}", batch_pages.get_batch, is_of_server=True),
    Route("POST", "/v1/batches/{name}/cancel", batch_pages.cancel_batch, is_of_server=True),
    Route("POST", "/v1/messages", messages.create_message, body=MessagesBody, error_body=messages.error_body),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_message_tokens,
        body=CountBody,
        error_body=messages.error_body,
    ),
    Route("POST", "/v1/embeddings", embeddings.create_embeddings, body=embeddings.EmbeddingBody),
    Route("POST", "/pooling", embeddings.create_pooling, body=embeddings.PoolingBody),
    Route("POST", "/classify", embeddings.classify, body=embeddings.ClassifyBody),
    *(Route("POST", path, scores.create_score, body=scores.ScoreBody) for path in ("/v1/score", "/score")),
    *(Route("POST", path, scores.rerank, body=scores.RerankBody) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    Route("GET", "/v1/sessions", sessions.list_sessions),
    Route("DELETE", "/v1/sessions/{name}", sessions.release_session),
    Route("POST", "/v1/sessions/{name}/release", sessions.release_session),
    Route("POST", "/v1/sessions/{name}/fork", sessions.fork_session, body=sessions.ForkBody),
    Route("GET", "/v1/models", models.list_models),
    Route("GET", "/v1/models/", models.get_model),
    Route("POST", "/tokenize", models.tokenize, body=TokenizeBody),
    Route("POST", "/detokenize", models.detokenize, body=DetokenizeBody),
    Route("GET", "/tokenizer_info", models.get_tokenizer_info),
    *(Route(*row[:3], body=row[3]) for row in _LLAMA_CPP),
    *(Route(*row[:3], body=row[3], error_body=ollama.error_body) for row in _OLLAMA),
    Route("GET", "/v1/load", load.get_load),
    Route("GET", "/", page.get_page, Access.OPEN),
    Route("GET", "/page/{name}", page.get_file, Access.OPEN),
    Route("GET", "/openapi.json", openapi.get_description),
    Route("GET", "/metrics", metrics.get_metrics),
    Route("GET", "/version", models.get_version),
    Route("GET", "/health", health.get_health, Access.OPEN),
    Route("GET", "/ping", health.get_health, Access.OPEN),
    Route("GET", "/live", health.get_live, Access.OPEN),
    Route("GET", "/ready", health.get_health, Access.OPEN),
)

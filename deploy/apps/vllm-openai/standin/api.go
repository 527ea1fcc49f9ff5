package main

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
)

// request has the keys of completions and chat completions that the stand-in heeds; others are accepted, as by vLLM.
type request struct {
	Model    string `json:"model"`
	Prompt   any    `json:"prompt"`
	Messages []struct {
		Role    string `json:"role"`
		Content any    `json:"content"`
	} `json:"messages"`
	MaxTokens           *int `json:"max_tokens"`
	MaxCompletionTokens *int `json:"max_completion_tokens"`
	Stream              bool `json:"stream"`
	StreamOptions       struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	TotalTokens      int `json:"total_tokens"`
	CompletionTokens int `json:"completion_tokens"`
}

type message struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

type choice struct {
	Index        int      `json:"index"`
	Text         *string  `json:"text,omitempty"`
	Message      *message `json:"message,omitempty"`
	Delta        *message `json:"delta,omitempty"`
	FinishReason *string  `json:"finish_reason"`
}

type response struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   *usage   `json:"usage,omitempty"`
}

// tokens are words here; a real tokenizer belongs to a model.
func tokens(text string) []string { return strings.Fields(text) }

func (s *server) completions(w http.ResponseWriter, r *http.Request) {
	q, ok := s.read(w, r)
	if !ok {
		return
	}
	prompt, isText := q.Prompt.(string)
	if !isText || prompt == "" {
		refuse(w, http.StatusBadRequest, "BadRequestError", "prompt must be a text")
		return
	}
	s.answer(w, r, q, prompt, false)
}

func (s *server) chatCompletions(w http.ResponseWriter, r *http.Request) {
	q, ok := s.read(w, r)
	if !ok {
		return
	}
	if len(q.Messages) == 0 {
		refuse(w, http.StatusBadRequest, "BadRequestError", "messages must not be empty")
		return
	}
	var text []string
	for _, m := range q.Messages {
		text = append(text, contentText(m.Content))
	}
	s.answer(w, r, q, strings.Join(text, "\n"), true)
}

// contentText is a message's text, also where its content is a list of parts.
func contentText(content any) string {
	switch c := content.(type) {
	case string:
		return c
	case []any:
		var text []string
		for _, part := range c {
			if p, is := part.(map[string]any); is {
				text = append(text, fmt.Sprint(p["text"]))
			}
		}
		return strings.Join(text, "\n")
	}
	return ""
}

func (s *server) read(w http.ResponseWriter, r *http.Request) (q request, ok bool) {
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		refuse(w, http.StatusBadRequest, "BadRequestError", err.Error())
		return q, false
	}
	if q.Model != "" && !slices.Contains(s.servedNames, q.Model) {
		refuse(w, http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist.", q.Model))
		return q, false
	}
	if q.Model == "" {
		q.Model = s.servedNames[0]
	}
	return q, true
}

// answer repeats the prompt, within the length of the model.
func (s *server) answer(w http.ResponseWriter, r *http.Request, q request, prompt string, chat bool) {
	asked := tokens(prompt)
	room := s.maxModelLen - len(asked)
	limit := room
	for _, given := range []*int{q.MaxTokens, q.MaxCompletionTokens} {
		if given != nil {
			limit = *given
		}
	}
	if room < 1 || limit < 1 || limit > room {
		refuse(w, http.StatusBadRequest, "BadRequestError", fmt.Sprintf("This model's maximum context length is %d "+
			"tokens. You requested %d tokens in the completion and %d in the prompt.", s.maxModelLen, limit, len(asked)))
		return
	}
	s.running.Inc()
	defer s.running.Dec()
	said := append([]string{"(vLLM", "stand-in)"}, asked...)
	reason := "stop"
	if len(said) > limit {
		said, reason = said[:limit], "length"
	}
	s.promptTokens.Add(float64(len(asked)))
	s.generationTokens.Add(float64(len(said)))
	s.succeeded.WithLabelValues(reason).Inc()
	a := response{
		ID: "cmpl-" + rand.Text(), Object: "text_completion", Created: time.Now().Unix(), Model: q.Model,
		Usage: &usage{len(asked), len(asked) + len(said), len(said)},
	}
	if chat {
		a.ID, a.Object = "chat"+a.ID, "chat.completion"
	}
	if q.Stream {
		a.stream(w, r, said, reason, q.StreamOptions.IncludeUsage)
		return
	}
	text := strings.Join(said, " ")
	a.Choices = []choice{{FinishReason: &reason, Text: &text}}
	if chat {
		a.Choices = []choice{{FinishReason: &reason, Message: &message{"assistant", text}}}
	}
	writeJSON(w, http.StatusOK, a)
}

// stream sends a completion word by word as server-sent events, which [DONE] ends.
func (a response) stream(w http.ResponseWriter, r *http.Request, said []string, reason string, withUsage bool) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	flush := http.NewResponseController(w)
	total := a.Usage
	a.Usage = nil
	chat := strings.HasPrefix(a.ID, "chat")
	if chat {
		a.Object = "chat.completion.chunk"
	}
	send := func(event any) bool {
		data, err := json.Marshal(event)
		if err == nil {
			_, err = fmt.Fprintf(w, "data: %s\n\n", data)
		}
		return err == nil && flush.Flush() == nil && r.Context().Err() == nil
	}
	for i, word := range said {
		if i < len(said)-1 {
			word += " "
		}
		a.Choices = []choice{{Text: &word}}
		if chat {
			a.Choices = []choice{{Delta: &message{"assistant", word}}}
		}
		if i == len(said)-1 {
			a.Choices[0].FinishReason = &reason
		}
		if !send(a) {
			return
		}
	}
	if withUsage {
		a.Choices, a.Usage = []choice{}, total
		if !send(a) {
			return
		}
	}
	_, _ = fmt.Fprint(w, "data: [DONE]\n\n")
}

func (s *server) tokenize(w http.ResponseWriter, r *http.Request) {
	q, ok := s.read(w, r)
	if !ok {
		return
	}
	prompt, isText := q.Prompt.(string)
	if !isText {
		refuse(w, http.StatusBadRequest, "BadRequestError", "prompt must be a text")
		return
	}
	n := len(tokens(prompt))
	ids := make([]int, n)
	for i := range ids {
		ids[i] = i
	}
	writeJSON(w, http.StatusOK, map[string]any{"count": n, "max_model_len": s.maxModelLen, "tokens": ids})
}

// refuse answers with vLLM's form of an error.
func refuse(w http.ResponseWriter, status int, kind, text string) {
	writeJSON(w, status, map[string]any{
		"error": map[string]any{"message": text, "type": kind, "param": nil, "code": status},
	})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

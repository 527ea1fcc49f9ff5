package main

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func none(string) string { return "" }

func serve(t *testing.T, args ...string) *httptest.Server {
	t.Helper()
	f, err := parseFlags(args, none)
	require.NoError(t, err)
	s := httptest.NewServer(newServer(f, time.Unix(1, 0)).handler())
	t.Cleanup(s.Close)
	return s
}

// ask sends a request, with a key where one is given, and returns status and body.
func ask(t *testing.T, method, url, body string, key ...string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	require.NoError(t, err)
	for _, k := range key {
		r.Header.Set("Authorization", "Bearer "+k)
	}
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(text)
}

func TestFlagsAreThoseOfTheServer(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(config, []byte("port: 9000\nmax-model-len: 128\n"), 0o600))
	f, err := parseFlags([]string{
		"serve", "org/model", "--served-model-name", "a,b", "--port=8001", "--config", config,
		"--tensor-parallel-size", "2", "--gpu-memory-utilization=0.8", "--dtype", "bfloat16", "--enforce-eager",
	}, func(name string) string { return map[string]string{"VLLM_API_KEY": "secret"}[name] })
	require.NoError(t, err)
	require.Equal(t, flags{
		model: "org/model", servedNames: []string{"a", "b"}, port: 8001, apiKeys: []string{"secret"}, maxModelLen: 128,
		tensorParallel: 2, pipelineParallel: 1,
	}, f)
	for name, args := range map[string][]string{
		"no model":     {"serve"},
		"unknown flag": {"serve", "m", "--no-such-flag"},
		"two models":   {"serve", "m", "n"},
		"utilization":  {"serve", "m", "--gpu-memory-utilization=1.5"},
		"dtype":        {"serve", "m", "--dtype=int4"},
		"port":         {"serve", "m", "--port=70000"},
		"length":       {"serve", "m", "--max-model-len=0"},
		"config":       {"serve", "m", "--config=/nowhere"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseFlags(args, none)
			require.ErrorAs(t, err, new(usageError))
		})
	}
}

func TestGPUsAreCountedByTheirDeviceNodes(t *testing.T) {
	dev := t.TempDir()
	n, err := visibleGPUs(dev)
	require.NoError(t, err)
	require.Zero(t, n)
	require.NoError(t, os.Mkdir(filepath.Join(dev, "dri"), 0o700))
	for _, name := range []string{"dri/renderD128", "dri/renderD129", "dri/card0"} {
		require.NoError(t, os.WriteFile(filepath.Join(dev, name), nil, 0o600))
	}
	n, err = visibleGPUs(dev)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	for _, name := range []string{"nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"} {
		require.NoError(t, os.WriteFile(filepath.Join(dev, name), nil, 0o600))
	}
	n, err = visibleGPUs(dev)
	require.NoError(t, err)
	require.Equal(t, 3, n)
}

func TestMoreGPUsThanAreVisibleEndTheServer(t *testing.T) {
	err := run(t.Context(), []string{"serve", "m", "--tensor-parallel-size=64"})
	require.ErrorContains(t, err, "need 64 GPUs")
}

func TestCompletionsFollowTheAPI(t *testing.T) {
	s := serve(t, "serve", "org/model", "--served-model-name=small", "--max-model-len=16")
	code, body := ask(t, "GET", s.URL+"/v1/models", "")
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, body, `"id":"small"`)
	require.Contains(t, body, `"root":"org/model"`)

	var a response
	code, body = ask(t, "POST", s.URL+"/v1/completions", `{"model":"small","prompt":"one two three"}`)
	require.Equal(t, http.StatusOK, code, body)
	require.NoError(t, json.Unmarshal([]byte(body), &a))
	require.Equal(t, "(vLLM stand-in) one two three", *a.Choices[0].Text)
	require.Equal(t, "stop", *a.Choices[0].FinishReason)
	require.Equal(t, usage{PromptTokens: 3, CompletionTokens: 5, TotalTokens: 8}, *a.Usage)

	code, body = ask(t, "POST", s.URL+"/v1/chat/completions",
		`{"messages":[{"role":"user","content":[{"type":"text","text":"hello there"}]}],"max_tokens":3}`)
	require.Equal(t, http.StatusOK, code, body)
	require.NoError(t, json.Unmarshal([]byte(body), &a))
	require.Equal(t, message{"assistant", "(vLLM stand-in) hello"}, *a.Choices[0].Message)
	require.Equal(t, "length", *a.Choices[0].FinishReason)

	for body, want := range map[string]int{
		`{"model":"other","prompt":"x"}`: http.StatusNotFound,
		`{"prompt":"x","max_tokens":16}`: http.StatusBadRequest,
		`{"prompt":""}`:                  http.StatusBadRequest,
		`{`:                              http.StatusBadRequest,
		`{"prompt":"` + strings.Repeat("x ", 20) + `"}`: http.StatusBadRequest,
	} {
		code, answer := ask(t, "POST", s.URL+"/v1/completions", body)
		require.Equal(t, want, code, body)
		require.Contains(t, answer, `"error":{`)
	}
	_, body = ask(t, "GET", s.URL+"/metrics", "")
	require.Contains(t, body, `vllm:prompt_tokens_total{engine="0",model_name="small"} 5`)
	require.Contains(t, body, `vllm:request_success_total{engine="0",finished_reason="length",model_name="small"} 1`)
	_, body = ask(t, "POST", s.URL+"/tokenize", `{"prompt":"a b c"}`)
	require.JSONEq(t, `{"count":3,"max_model_len":16,"tokens":[0,1,2]}`, body)
}

func TestAStreamEndsWithDone(t *testing.T) {
	s := serve(t, "serve", "m")
	_, body := ask(t, "POST", s.URL+"/v1/chat/completions",
		`{"messages":[{"role":"user","content":"hello"}],"stream":true,"stream_options":{"include_usage":true}}`)
	var text string
	var last []byte
	lines := bufio.NewScanner(strings.NewReader(body))
	for lines.Scan() {
		data, is := strings.CutPrefix(lines.Text(), "data: ")
		if !is {
			require.Empty(t, lines.Text())
			continue
		}
		if data == "[DONE]" {
			last = nil
			continue
		}
		var event response
		last = []byte(data)
		require.NoError(t, json.Unmarshal(last, &event))
		for _, c := range event.Choices {
			text += c.Delta.Content
		}
	}
	require.Nil(t, last, "something follows [DONE]")
	require.Equal(t, "(vLLM stand-in) hello", text)
	require.Contains(t, body, `"usage":{"prompt_tokens":1,"total_tokens":4,"completion_tokens":3}`)
}

func TestAKeyGuardsTheAPIAlone(t *testing.T) {
	s := serve(t, "serve", "m", "--api-key=right")
	for path, want := range map[string]int{
		"/v1/models": http.StatusUnauthorized, "/health": http.StatusOK, "/ping": http.StatusOK,
		"/metrics": http.StatusOK, "/version": http.StatusOK,
	} {
		code, _ := ask(t, "GET", s.URL+path, "")
		require.Equal(t, want, code, path)
	}
	code, _ := ask(t, "GET", s.URL+"/v1/models", "", "wrong")
	require.Equal(t, http.StatusUnauthorized, code)
	code, _ = ask(t, "GET", s.URL+"/v1/models", "", "right")
	require.Equal(t, http.StatusOK, code)
}

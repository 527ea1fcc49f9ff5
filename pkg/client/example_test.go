package client_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// exampleHub answers a few requests as a hub does.
func exampleHub() *httptest.Server {
	mux := http.NewServeMux()
	answer := func(pattern string, status int, contentType string, text ...string) {
		asked := 0
		mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			w.WriteHeader(status)
			_, _ = fmt.Fprint(w, text[min(asked, len(text)-1)])
			asked++
		})
	}
	const json, problem = "application/json", "application/problem+json"
	answer("GET /api/v1/orgs", 200, json, `{"items":[{"slug":"acme"}],"next_cursor":"2"}`, `{"items":[{"slug":"zenith"}]}`)
	answer("POST /api/v1/projects/p/app-instances", 201, json, `{"id":"i","status":"requested","resource_version":1}`)
	answer("GET /api/v1/projects/p/app-instances/i", 200, json, `{"id":"i","status":"deploying","resource_version":2}`,
		`{"id":"i","status":"running","resource_version":3}`)
	answer("POST /api/v1/projects/p/app-instances/i/upgrade", 422, problem, `{"status":422,"code":"version_unknown",
		"detail":"The app has no such version.","correlation_id":"c-1"}`)
	answer("GET /api/v1/events", 200, "text/event-stream",
		"id: 1\ndata: {\"type\":\"apps.instance.running\",\"pos\":1}\n\n")
	return httptest.NewServer(mux)
}

func exampleClient(server *httptest.Server) *client.Hub {
	hub, err := client.Open(client.Config{URL: server.URL, Credential: client.BearerToken("token")})
	if err != nil {
		panic(err)
	}
	return hub
}

// Launch an app and wait until it runs. The POST has an idempotency key of its own; where the hub is busy or the answer
// is lost, it is sent again with the same one.
func Example() {
	server := exampleHub()
	defer server.Close()
	hub, err := client.Open(client.Config{URL: server.URL, Credential: client.BearerToken("token")})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	i, err := client.Read[client.AppInstance](hub.CreateAppInstance(ctx, "p", client.AppInstanceCreate{
		AppSlug: "hello", Version: "1.0.0", DisplayName: "first",
	}))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(i.Status)
	i, err = hub.WaitInstance(ctx, "p", i.ID, client.AppInstanceStatusRunning, nil)
	fmt.Println(i.Status, err)
	// Output:
	// requested
	// running <nil>
}

// A program has a service account: its tokens are minted when they are needed, and renewed before they end.
func ExampleNewServiceAccountCredential() {
	conf := client.Config{URL: "https://hub.example:8443", CAFile: "ca.pem"}
	key, err := os.ReadFile("key.pem") // as the account's creation gave it
	if err != nil {
		fmt.Println("no key")
		return
	}
	if conf.Credential, err = client.NewServiceAccountCredential(conf, "account id", "key id", key); err != nil {
		fmt.Println(err)
		return
	}
	hub, err := client.Open(conf)
	fmt.Println(hub != nil, err)
	// Output: no key
}

// A list goes through all pages.
func ExampleAll() {
	server := exampleHub()
	defer server.Close()
	hub := exampleClient(server)
	for org, err := range client.All[client.Org](func(cursor string) (*http.Response, error) {
		return hub.ListOrgs(context.Background(), &client.ListOrgsParams{Cursor: cursor, Limit: client.PageSize})
	}) {
		fmt.Println(org.Slug, err)
	}
	// Output:
	// acme <nil>
	// zenith <nil>
}

// A refusal is a *Problem: its code is part of the contract, its correlation id finds the request in the hub's log.
func ExampleProblem() {
	server := exampleHub()
	defer server.Close()
	_, err := client.Read[client.AppInstance](exampleClient(server).UpgradeAppInstance(context.Background(), "p", "i",
		client.AppInstanceUpgrade{TargetVersion: "9.9.9"}))
	if problem, ok := errors.AsType[*client.Problem](err); ok {
		fmt.Println(problem.Status, problem.Code, problem.CorrelationID)
	}
	// Output: 422 version_unknown c-1
}

// What happened, as it happens: with Follow it goes on until the context or the function ends it.
func ExampleEvents() {
	server := exampleHub()
	defer server.Close()
	err := client.Events(context.Background(), exampleClient(server), client.StreamEventsParams{},
		func(e client.Event) error {
			fmt.Println(e.Type)
			return nil
		})
	fmt.Println(err)
	// Output:
	// apps.instance.running
	// <nil>
}

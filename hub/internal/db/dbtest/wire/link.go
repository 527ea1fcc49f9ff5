package wire

import (
	"net"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgproto3"
)

// link is one connection of the hub's with the one to PostgreSQL that serves it.
type link struct {
	proxy          *Proxy
	client, server net.Conn
	toServer       *pgproto3.Frontend
	toClient       *pgproto3.Backend
	// statements and portals have the texts of prepared statements, by their names.
	statements, portals map[string]string
	// begin is the text of the last BEGIN; CockroachDB restarts a transaction with its properties.
	begin string

	mu sync.Mutex
	// afterCommit is the fault that happens when the server has committed.
	afterCommit *fault
	// pending is the translated statement that the server executes.
	pending translation
	// failed says whether the pending statement has failed.
	failed bool
	// started is set once the server has taken the connection.
	started bool
}

func (l *link) cut() {
	_ = l.client.Close()
	_ = l.server.Close()
}

// requests passes on what the hub says until either side ends.
func (l *link) requests() {
	startup, err := l.toClient.ReceiveStartupMessage()
	if err != nil {
		return
	}
	switch startup.(type) {
	case *pgproto3.SSLRequest, *pgproto3.GSSEncRequest:
		if _, err := l.client.Write([]byte("N")); err != nil {
			return
		}
		if startup, err = l.toClient.ReceiveStartupMessage(); err != nil {
			return
		}
	}
	for m := startup; ; {
		if m = l.request(m); m == nil {
			return
		}
		l.toServer.Send(m)
		if l.toServer.Flush() != nil {
			return
		}
		if m, err = l.toClient.Receive(); err != nil {
			return
		}
	}
}

// request is the message that goes to the server in place of m; nil ends the connection.
func (l *link) request(m pgproto3.FrontendMessage) pgproto3.FrontendMessage {
	switch m := m.(type) {
	case *pgproto3.Parse:
		m.Query = l.text(m.Query)
		l.statements[m.Name] = m.Query
	case *pgproto3.Bind:
		l.portals[m.DestinationPortal] = l.statements[m.PreparedStatement]
	case *pgproto3.Execute:
		sql, ends := l.due(l.portals[m.Portal])
		if ends {
			return nil
		}
		if sql != l.portals[m.Portal] {
			return &pgproto3.Parse{Query: sql} // fails, and the server ignores the rest of the batch
		}
	case *pgproto3.Query:
		sql, ends := l.due(l.text(m.String))
		if ends {
			return nil
		}
		m.String = l.translate(sql)
	}
	return m
}

// text is a statement as the proxy was told to change it.
func (l *link) text(sql string) string {
	if l.proxy.rewrite != nil {
		sql = l.proxy.rewrite(sql)
	}
	if l.proxy.cockroach {
		sql = strings.ReplaceAll(sql, "version()", "'"+cockroachVersion+"'")
	}
	return sql
}

// due lets happen what is due at a statement: it returns the statement to execute, or that the connection ends.
func (l *link) due(sql string) (execute string, ends bool) {
	f := l.proxy.at(sql)
	if f == nil {
		return sql, false
	}
	switch f.how {
	case refuse:
		return l.proxy.marker(f.answer), false
	case cutBefore:
		return "", true
	case refuseAfter, cutAfter:
		l.mu.Lock()
		l.afterCommit = f
		l.mu.Unlock()
	}
	return sql, false
}

// answers passes on what the server says until either side ends.
func (l *link) answers() {
	for {
		m, err := l.toServer.Receive()
		if err != nil {
			return
		}
		list, ends := l.answer(m)
		for _, m := range list {
			l.toClient.Send(m)
		}
		if ends || l.toClient.Flush() != nil {
			return
		}
	}
}

// answer is what goes to the hub in place of a message, and whether the connection ends.
func (l *link) answer(m pgproto3.BackendMessage) (list []pgproto3.BackendMessage, ends bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch m := m.(type) {
	case *pgproto3.ErrorResponse:
		l.failed = true
		if e := l.proxy.answerFor(m); e != nil {
			return []pgproto3.BackendMessage{e}, false
		}
		if l.proxy.cockroach {
			asCockroach(m)
		}
	case *pgproto3.CommandComplete:
		if f := l.afterCommit; f != nil && string(m.CommandTag) == "COMMIT" {
			l.afterCommit = nil
			if f.how == cutAfter {
				return nil, true
			}
			l.failed = true
			return []pgproto3.BackendMessage{f.answer}, false
		}
		return l.completed(m), false
	case *pgproto3.ReadyForQuery:
		return l.ready(m), false
	}
	return []pgproto3.BackendMessage{m}, false
}

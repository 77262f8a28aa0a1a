class ChatTemplate: pass
